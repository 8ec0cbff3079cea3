"""Per-request output state of the engine: detokenization, guide, pending outputs."""

from collections import abc
from collections.abc import Callable

import numpy as np

from jaxscale.inference.engine.sampling import NUM_TOP
from jaxscale.inference.engine.scheduling.scheduler_output import Chunk, Progress
from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.grammar import Matcher
from jaxscale.inference.output import FinishReason, Output, TokenLogprobs
from jaxscale.inference.request import EngineDead, Request
from jaxscale.inference.text import TextDecoder, TextStream
from jaxscale.inference.token_rules import TokenRules


type Sink = Callable[[list[Output] | EngineDead], None]
"""Called on the engine's thread with new outputs, and once if the engine dies."""

_ERRORS: dict[str, str] = {
    "error": "the model's logits were not finite",
    "timeout": "the deadline of the request has passed",
}


class OutputProcessor:
    """A request, its client, and its pending outputs."""

    def __init__(
        self,
        request: Request,
        sink: Sink,
        tokenizer: TextDecoder | None,
        matcher: Matcher | None,
        rules: TokenRules | None = None,
    ) -> None:
        params = request.params
        self.request, self.sink = request, sink
        self._id, self._wants_logprobs = request.id, params.logprobs is not None
        self.remaining = params.n
        """Sequences that have not ended."""
        self.matchers = [matcher and matcher.copy() for _ in range(params.n)]
        self.rules = [] if rules is None else [rules.copy() for _ in range(params.n)]
        """Per sequence, if there are any."""
        self.cached_tokens = 0
        self.stuck: set[int] = set()
        """Sequences whose guide allows no token."""
        self._texts = [
            None if tokenizer is None else TextStream(tokenizer, request.prompt, params)
            for _ in range(params.n)
        ]
        self._plain = not (
            tokenizer or matcher or self.rules or self._wants_logprobs
        )  # outputs are tokens, as most are
        self._scores: list[TokenLogprobs | None] = [None]
        self._news: dict[int, Output] = {}
        if params.prompt_logprobs is not None and len(request.prompt) == 1:
            self._new(0).prompt_logprobs = (None,)  # nothing has to be computed

    def wants_scores(self, c: Sequence) -> bool:
        """Whether prompt log-probabilities, which `c` computes, are missing."""
        wanted = self.request.params.prompt_logprobs is not None and c.index == 0
        return wanted and len(self._scores) < len(self.request.prompt)

    def take_scores(self, chunk: Chunk, scores: np.ndarray) -> None:
        """Log-probabilities of the next tokens of a chunk, [tokens, 41]."""
        prompt, most = self.request.prompt, self.request.params.prompt_logprobs or 0
        following = prompt[chunk.start + 1 : chunk.end + 1]
        for i, token in enumerate(following, start=chunk.start + 1):
            if i == len(self._scores):
                row = scores[i - chunk.start - 1]
                value = float(row[:1].view(np.float32)[0])
                self._scores.append(
                    TokenLogprobs(token=token, logprob=value, top=_top(row[1:], most))
                )
        if len(self._scores) == len(prompt):
            self._new(0).prompt_logprobs = tuple(self._scores)

    def take(self, progress: Progress, top: np.ndarray | None) -> FinishReason | None:
        """Process sampled tokens.

        Args:
            progress: Progress from the scheduler.
            top: [steps, B, 40], the most likely tokens, if they were computed.

        Returns:
            The finish reason of the sequence, if the scheduler does not know it yet.
        """
        c, tokens = progress.sequence, progress.tokens
        news = self._news.get(c.index)
        if news is None:
            news = self._news[c.index] = Output(request=self._id, index=c.index)
        if self._plain:
            news.tokens += tuple(tokens)
            return None
        verdict: FinishReason | None = None
        if self.rules:
            self.rules[c.index].accept(tokens)
        matcher = self.matchers[c.index]
        if matcher is not None and progress.finish is None:
            if not matcher.accept(tokens):
                verdict = "error"
                self.stuck.add(c.index)
            elif matcher.finished:
                verdict = "stop"
        stream = self._texts[c.index]
        if stream is not None:
            before = stream.num_tokens
            # The last token of a guide has text, a stop token has none.
            news.text += stream.add(tokens, progress.finish or (verdict and "length"))
            if stream.stop is not None:
                tokens = tokens[: stream.num_tokens - before]
                verdict = "stop"
        news.tokens += tuple(tokens)
        if self._wants_logprobs:
            news.logprobs += self._logprobs(progress, tokens, top)
        return verdict

    def end(self, c: Sequence, finish: FinishReason | None) -> None:
        """Record the finish reason of a sequence."""
        news, stream = self._new(c.index), self._texts[c.index]
        if finish == "length" and stream is not None and stream.stop is not None:
            finish = "stop"  # its text ended first, among tokens of the same step
        news.finish = finish
        if stream is not None and finish in ("aborted", "timeout"):
            news.text += stream.add([], finish)

    def outputs(self) -> list[Output]:
        """The outputs since the last call."""
        outputs, self._news = list(self._news.values()), {}
        for output in outputs:
            output.cached_tokens = self.cached_tokens
            if output.finish is not None:
                self.remaining -= 1
                self._explain(output)
        return outputs

    def _new(self, index: int) -> Output:
        return self._news.setdefault(index, Output(request=self._id, index=index))

    def _logprobs(
        self, progress: Progress, tokens: abc.Sequence[int], top: np.ndarray | None
    ) -> tuple[TokenLogprobs, ...]:
        most = self.request.params.logprobs
        pairs = zip(tokens, progress.logprobs, strict=False)
        if not most or not progress.decoded or top is None:
            found = [
                TokenLogprobs(token=token, logprob=value) for token, value in pairs
            ]
            return tuple(found)
        rows = top[: len(tokens), progress.row]
        likeliest = [_top(row, most) for row in rows] + [()] * (len(tokens) - len(rows))
        return tuple(
            TokenLogprobs(token=token, logprob=value, top=best)
            for (token, value), best in zip(pairs, likeliest, strict=False)
        )

    def _explain(self, output: Output) -> None:
        """Say what has ended a sequence, beside the finish reason."""
        index = output.index
        if output.finish == "stop":
            stream = self._texts[index]
            found = None if stream is None else stream.stop
            last = output.tokens[-1] if output.tokens else None
            output.stop = last if found is None else found
        output.error = _ERRORS.get(output.finish or "")
        if index in self.stuck and output.finish == "error":
            matcher = self.matchers[index]
            why = None if matcher is None else matcher.error
            output.error = "what the request allows leaves no token to be drawn"
            output.error += f": {why}" if why else "; change it"
            output.blames_request = True


def _top(row: np.ndarray, most: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens and their log-probabilities."""
    values = np.ascontiguousarray(row[NUM_TOP : 2 * NUM_TOP]).view(np.float32)
    pairs = zip(row[:most].tolist(), values[:most].tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if token >= 0)
