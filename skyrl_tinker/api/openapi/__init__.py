"""OpenAPI document served at /docs: schemas of bodies, description, examples."""
