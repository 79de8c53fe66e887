"""Pure ASGI layers around the routes: authentication, body limits, compression, fast routes."""
