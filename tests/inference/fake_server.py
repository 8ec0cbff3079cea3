"""A server on loopback that speaks just enough of OpenAI's API, badly if asked to."""

import asyncio
import json
import threading


class FakeServer:
    """Answers every completion with its `max_tokens` events, `gap` seconds apart.

    It begins when `together` are there, and `first` seconds have passed.
    """

    def __init__(self, *, first=0.0, gap=0.0, together=1, behave=None):
        self.first, self.gap, self.together = first, gap, together
        self._all_there = asyncio.Event()
        # Of the number of a request, what is wrong with its answer.
        self.behave = behave or (lambda number: None)
        self.bodies, self.headers, self.running, self.most = [], [], 0, 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(120)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        async def stop():
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                await self._answer(writer, lines[0].split()[1], fields, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer, path, fields, body):
        if path == "/v1/models":
            return self._whole(writer, 200, {"data": [{"id": "tiny"}]})
        number = len(self.bodies)
        self.bodies.append((path, json.loads(body)))
        self.headers.append(fields)
        wrong = self.behave(number)
        if isinstance(wrong, int):
            return self._whole(writer, wrong, {"error": {"message": "too much"}})
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == self.together:
            self._all_there.set()
        try:
            await self._all_there.wait()
            await self._stream(writer, json.loads(body), wrong)
        finally:
            self.running -= 1

    async def _stream(self, writer, body, wrong):
        count = body["max_tokens"]
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await asyncio.sleep(self.first)
        for i in range(count):
            if i:
                await asyncio.sleep(self.gap)
            if wrong == "hang" and i == 1:
                await asyncio.sleep(60)
            if wrong == "error" and i == 1:
                self._event(writer, {"error": {"message": "out of luck"}})
                break
            if wrong == "cut" and i == 1:
                return writer.close()
            self._event(writer, {"choices": [{"text": "x", "index": 0}]})
            await writer.drain()
        if wrong != "silent":
            usage = {"prompt_tokens": 5, "completion_tokens": count * 2}
            self._event(writer, {"choices": [], "usage": usage})
            self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")
        await writer.drain()

    def _event(self, writer, data):
        text = f"data: {json.dumps(data)}\n\n".encode()
        half = len(text) // 2  # events need not come in one piece
        self._chunk(writer, text[:half])
        self._chunk(writer, text[half:])

    def _chunk(self, writer, data):
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, writer, status, data):
        text = json.dumps(data).encode()
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(text))
        )
        writer.write(text)
