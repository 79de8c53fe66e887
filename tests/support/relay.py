"""Relay from a listener of this machine to a port of a host of tests.support.hosts; runs on that host."""

import asyncio
import socket
import sys

_BLOCK_BYTES = 1 << 16


async def _relay(listener: socket.socket, port: int) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    server = await asyncio.start_server(connect, sock=listener)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(_BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    except OSError:  # the other side is told by closing
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(_relay(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
