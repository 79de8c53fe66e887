"""Routes of the HTTP API, one module per resource.

In: HTTP requests that passed the middleware. Out: responses. Imports every other package of the API; only
`app` imports it.
"""
