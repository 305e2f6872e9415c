"""What is written by hand against the libraries that could stand in its place (ADR 0073).

    python benchmarks/hand_written.py [--json FILE]

CPU time of this process alone, so that neighbours move it little; in turns, medians. Needs
python-multipart, httpx, aiohttp, matplotlib and the default model in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

ROUNDS = 5
EVENTS = 5_000
SERVER = f"""
import asyncio
EVENT = b'data: {{"choices":[{{"delta":{{"content":" river"}}}}]}}\\n\\n'
CHUNK = b"%x\\r\\n%s\\r\\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\n"
HEAD += b"transfer-encoding: chunked\\r\\n\\r\\n"
async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(HEAD)
    for _ in range({EVENTS}):
        writer.write(CHUNK)
        await asyncio.sleep(0)
        await writer.drain()
    writer.write(b"0\\r\\n\\r\\n")
    await writer.drain()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def cpu(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def in_turns(**works: Callable[[], Any]) -> dict[str, float]:
    """Median CPU seconds of each, after one try that is thrown away."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            seconds = cpu(work)
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def form() -> dict[str, float]:
    """Seconds for a form with a file of 64 MiB, in chunks of 64 KiB."""
    from python_multipart.multipart import MultipartParser

    from headrace.server.files.form import FormReader

    piece = bytes(range(256)) * 256
    head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    chunks = [head, *[piece] * 1024, b"\r\n--B--\r\n"]

    async def own() -> int:
        async def come() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        reader, size = FormReader(come(), b"B"), 0
        while await reader.part() is not None:
            async for data in reader.data():
                size += len(data)
        return size

    def library() -> int:
        sizes: list[int] = []
        parser = MultipartParser(
            b"B", {"on_part_data": lambda _data, begin, end: sizes.append(end - begin)}
        )
        for chunk in chunks:
            parser.write(chunk)
        parser.finalize()
        return sum(sizes)

    assert asyncio.run(own()) == library() == len(piece) * 1024
    return in_turns(own=lambda: asyncio.run(own()), python_multipart=library)


def client() -> dict[str, float]:
    """Microseconds an event of a stream, from the socket to the caller's bytes."""
    import aiohttp
    import httpx

    from headrace.bench.http import Connection, parse_url, request_bytes

    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/"

        async def own() -> None:
            address = parse_url(url)
            connection = await Connection.open(address, 10)
            await connection.send(request_bytes(address, "GET", "/"), lambda _when, _data: None)
            connection.close()

        async def with_httpx() -> None:
            async with httpx.AsyncClient() as other, other.stream("GET", url) as reply:
                async for _ in reply.aiter_raw():
                    pass

        async def with_aiohttp() -> None:
            async with aiohttp.ClientSession() as other, other.get(url) as reply:
                async for _ in reply.content.iter_any():
                    pass

        def of(work: Callable[[], Awaitable[None]]) -> Callable[[], None]:
            return lambda: asyncio.run(work())  # type: ignore[arg-type]

        try:
            found = in_turns(own=of(own), httpx=of(with_httpx), aiohttp=of(with_aiohttp))
        finally:
            server.terminate()
    return {name: seconds / EVENTS * 1e6 for name, seconds in found.items()}


def chart() -> dict[str, float]:
    """Milliseconds and kilobytes of one chart of two lines as SVG; the import of the library."""
    from headrace.roofline.plot import Chart, Series, svg

    xs = [float(x) for x in range(1, 41)]
    lines = [Series(name, xs, [x * k for x in xs]) for name, k in (("a", 1.0), ("b", 2.0))]
    drawn = Chart("A chart", "x", "y", lines)
    code = "import time; t = time.process_time(); import matplotlib.backends.backend_svg; "
    code += "print(time.process_time() - t)"
    imported = float(subprocess.check_output([sys.executable, "-c", code], text=True))

    def library() -> bytes:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.add_subplot()
        for line in lines:
            axes.plot(line.xs, line.ys, label=line.name)
        axes.legend()
        out = BytesIO()
        FigureCanvasSVG(figure).print_svg(out)
        return out.getvalue()

    found = in_turns(own=lambda: svg(drawn), matplotlib=library)
    return {
        **{f"{name}, ms": seconds * 1e3 for name, seconds in found.items()},
        "own, kB": len(svg(drawn)) / 1e3,
        "matplotlib, kB": len(library()) / 1e3,
        "matplotlib's import, ms": imported * 1e3,
    }


def tokenizer() -> dict[str, float]:
    """Milliseconds until the default model's is ready, and for 370,000 characters of code."""
    from unittest.mock import patch

    from headrace.loader import open_model
    from headrace.text import from_gguf, load_tokenizer

    files: Any = open_model("qwen2.5-coder-0.5b", offline=True)
    text = "\n".join(
        path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("*.py"))
    )[:370_000]

    def own() -> Any:
        return load_tokenizer(files.tokenizer)

    def library() -> Any:
        with patch.object(from_gguf, "native_bpe", return_value=None):
            return load_tokenizer(files.tokenizer)

    ours, theirs = own(), library()
    assert ours.encode(text) == theirs.encode(text)
    ready = in_turns(own=own, tokenizers=library)
    encoded = in_turns(own=lambda: ours.encode(text), tokenizers=lambda: theirs.encode(text))
    return {
        **{f"{name}, ready, ms": seconds * 1e3 for name, seconds in ready.items()},
        **{f"{name}, encoded, ms": seconds * 1e3 for name, seconds in encoded.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for part in (form, client, chart, tokenizer):
        found[part.__name__] = part()
        print(
            part.__name__, {name: round(value, 3) for name, value in found[part.__name__].items()}
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
