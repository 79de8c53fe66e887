"""The OpenAPI document, its description and its examples, served at /docs."""
