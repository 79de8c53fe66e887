// Interactive documentation; a key that is entered is gone with the page.

SwaggerUIBundle({ url: "api/v1/openapi.json", dom_id: "#swagger-ui", deepLinking: true, docExpansion: "none" });
