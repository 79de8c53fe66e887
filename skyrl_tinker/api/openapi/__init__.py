"""OpenAPI document served at /docs: schemas of bodies, description, examples.

In: the app's routes and `protocol.schemas`. Out: the document. Imports nothing else of the API; routes
declare by it their input and answers.
"""
