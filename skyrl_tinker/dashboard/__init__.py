"""Pages of the dashboard: static files, served at `/` by `api.routes.pages` as they are.

Plain ES modules, without a build step. `vendor/` has uPlot 1.6.32, and the Latin letters of the typeface
Figtree (@fontsource-variable/figtree 5.3.0), as published, with their licences. The files hold no data:
scripts fetch it from `/api/v1/console/` with the key that the user enters.
"""
