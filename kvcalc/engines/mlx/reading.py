"""Read the commands that start MLX's server.

Source: mlx_lm/server.py, mlx-lm 0.32.0.
"""

from __future__ import annotations

from kvcalc.engines.reading import Reader


class MlxReader(Reader):
    """`mlx_lm.server ...`."""

    engine = "mlx"
    needs_context = False  # it allocates the cache while requests run
    programs = (("mlx_lm.server",), ("mlx_lm", "server"))
    harmless = """
        host port trust-remote-code! log-level chat-template use-default-chat-template! temp top-p top-k min-p
        max-tokens chat-template-args allowed-origins
    """


READER = MlxReader()
