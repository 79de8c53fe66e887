"""skyrl-tinker: an open server that speaks the Tinker API.

`cli` starts `server`, which runs two processes, `api` and `engine`; they share `store`, speak `protocol` and
use the words of `domain`. The engine drives `training` and `inference`, with `weight_sync` between them.
docs/architecture.md is the map.
"""

__version__ = "0.1.0"
