"""A request and what is asked of it: plain data, with vLLM's field names.

Nothing here knows a tokenizer, a clock or a tensor.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real

MAX_SAMPLES = 1024


def require_int(name, value, *, at_least, at_most=None):
    """Returns value as a Python int, or raises TypeError/ValueError naming it and its limits."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # an array of several numbers has an __index__, too
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if number < at_least or (at_most is not None and number > at_most):
        limit = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} is {number}, but must be {limit}")
    return number


def require_number(name, value, *, above=None, at_least=None, at_most=None):
    """Returns value as a finite float, or raises TypeError/ValueError naming it and its limits."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        value = float(value)
    except OverflowError:  # a whole number beyond all floats
        value = math.inf
    limits = [("above", above), ("at least", at_least), ("at most", at_most)]
    text = "".join(f" and {word} {limit}" for word, limit in limits if limit is not None)
    good = math.isfinite(value)
    good = good and (above is None or value > above) and (at_least is None or value >= at_least)
    good = good and (at_most is None or value <= at_most)
    if not good:
        raise ValueError(f"{name} is {value}, but must be finite{text}")
    return value


@dataclass(frozen=True)
class SamplingParams:
    """What to sample, and when to stop. Checked when it is made.

    The names are vLLM's. Two defaults differ, so that a first run is long enough to read and can
    be repeated: max_tokens is 128 (vLLM: 16) and temperature 0, which is greedy (vLLM: 1).

    max_tokens: output tokens at most; fewer where max_model_len leaves no room for more.
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: sample among the k most likely tokens; 0 or -1 for all.
    top_p: sample among the fewest most likely tokens whose probabilities reach top_p.
    stop: strings that end the output; the output text ends before them.
    stop_token_ids: token ids that end the output; the token stays in token_ids.
    ignore_eos: go on after the model's own end-of-sequence tokens.
    seed: start of this request's own random stream; None derives one from the engine's seed.
    n: independent samples of the same prompt.

    Raises TypeError or ValueError, naming the value and the limit.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1

    def __post_init__(self):
        def put(name, value):
            object.__setattr__(self, name, value)

        put("max_tokens", require_int("max_tokens", self.max_tokens, at_least=1))
        put("temperature", require_number("temperature", self.temperature, at_least=0))
        put("top_k", max(0, require_int("top_k", self.top_k, at_least=-1)))
        put("top_p", require_number("top_p", self.top_p, above=0, at_most=1))
        put("n", require_int("n", self.n, at_least=1, at_most=MAX_SAMPLES))
        if self.seed is not None:
            put("seed", require_int("seed", self.seed, at_least=0, at_most=2**64 - 1))
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable | None):
                raise TypeError(f"{name} must be a list, not {getattr(self, name)!r}")
        stop = () if self.stop is None else self.stop
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}, but each entry must be a non-empty string")
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError(f"stop holds {text!r}, half of a character, which no text has")
        put("stop", stop)
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        put("stop_token_ids", tuple(require_int("stop_token_ids", i, at_least=0) for i in ids))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search for the most likely answers. Checked when it is made. The names are vLLM's,
    and early_stopping is transformers'.

    beam_width: beginnings kept at every step, and answers returned.
    max_tokens: output tokens at most; fewer where max_model_len leaves no room for more.
    ignore_eos: go on after the model's own end-of-sequence tokens.
    length_penalty: answers are ranked by cum_logprob / num_output_tokens ** length_penalty (the
        end token counted): above 0 favours long ones.
    early_stopping: end once beam_width answers have ended. Otherwise the search goes on until the
        best beam, ranked as if it ended now, falls behind the worst of those answers.

    Raises TypeError or ValueError, naming the value and the limit.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self):
        for name, most in (("beam_width", MAX_SAMPLES), ("max_tokens", None)):
            value = require_int(name, getattr(self, name), at_least=1, at_most=most)
            object.__setattr__(self, name, value)
        # Beyond these limits powers of a length leave the range of floats.
        penalty = require_number("length_penalty", self.length_penalty, at_least=-32, at_most=32)
        object.__setattr__(self, "length_penalty", penalty)
        for name in ("ignore_eos", "early_stopping"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")


class Request:
    """One sequence on its way through the engine.

    Two counters say where it stands; there are no phases (a prompt, a chunk of it, a decode step
    and the recomputation after a preemption are all "num_computed_tokens catches up"):

    num_tokens: known tokens, prompt and sampled. The token just sampled is counted.
    num_computed_tokens: tokens whose keys and values lie in the pool. The token just sampled is
        not among them: the next forward pass computes it.

    A request of a simulation may give `num_prompt_tokens` alone; then token_ids is None. What such
    a prompt shares with others is named instead: by block_hashes or by prefix_id.

    token_ids: prompt and sampled tokens, or None.
    max_tokens: output tokens at most, already clipped to the engine's max_model_len.
    stop_token_ids: tokens that end the output (the model's end-of-sequence tokens among them).
    sample_index, children: sample i of n; the children wait until the parent's prompt is computed.
    token_runs: [first step, last step] for each run of consecutive steps that emitted a token.
    num_cached_tokens: tokens found in a cache at the first admission; -1 before it.
    cache_salt: prompts share blocks only with those of the same salt.
    block_hashes: a trace's own keys of the prompt's blocks, each of which names all before it, too.
    prefix_id, prefix_len: the first prefix_len tokens are those of all prompts with this prefix_id.
    block_keys: a prefix cache's memo of the keys of its full blocks, until the request has ended.
    keys_made_with: that cache's block size and hash function; another cache makes its own.

    Raises ValueError for an empty prompt, max_tokens below 1, a prefix_len beyond the prompt or
    without a prefix_id, or tokens that come with block_hashes or a prefix_id; and TypeError for
    names that cannot be looked up.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_keys",
        "cache_salt",
        "children",
        "error",
        "finish_reason",
        "finish_time",
        "first_scheduled_time",
        "first_token_time",
        "keys_made_with",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "prefix_id",
        "prefix_len",
        "request_id",
        "sample_index",
        "sampling_params",
        "seed",
        "stop_token_ids",
        "token_ids",
        "token_runs",
    )
    num_pad_tokens = 0  # padding before its first token: only a row of a static batch has any

    def __init__(
        self,
        request_id,
        prompt_token_ids=None,
        *,
        num_prompt_tokens=None,
        max_tokens=16,
        arrival_time=0.0,
        stop_token_ids=(),
        sampling_params=None,
        seed=0,
        sample_index=0,
        cache_salt=None,
        block_hashes=None,
        prefix_id=None,
        prefix_len=0,
    ):
        self.request_id = request_id
        self.token_ids = None if prompt_token_ids is None else list(prompt_token_ids)
        if self.token_ids is not None:
            num_prompt_tokens = len(self.token_ids)
        self.num_prompt_tokens = require_int(
            f"the number of prompt tokens of request {request_id!r}", num_prompt_tokens, at_least=1
        )
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.max_tokens = require_int("max_tokens", max_tokens, at_least=1)
        self.arrival_time = arrival_time
        self.stop_token_ids = frozenset(stop_token_ids)
        self.sampling_params, self.seed, self.sample_index = sampling_params, seed, sample_index
        self.cache_salt = cache_salt
        self.block_hashes = [] if block_hashes is None else block_hashes
        self.prefix_id = prefix_id
        self._require_names()
        self.prefix_len = require_int(
            f"prefix_len of request {request_id!r}",
            prefix_len,
            at_least=0,
            at_most=self.num_prompt_tokens,
        )
        if prefix_len and prefix_id is None:
            raise ValueError(
                f"request {request_id!r} has prefix_len {prefix_len}, but no prefix_id"
            )
        if self.token_ids is not None and (self.block_hashes or prefix_id is not None):
            raise ValueError(
                f"request {request_id!r} has tokens: they say what it shares, not block_hashes or "
                "prefix_id"
            )
        self.block_keys, self.keys_made_with = [], None
        self.children = []
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.first_scheduled_time = self.first_token_time = self.finish_time = None
        self.finish_reason = self.error = None
        self.token_runs = []

    def _require_names(self):
        """In the middle of a step it would be too late: each step would fail at it."""
        if not isinstance(self.block_hashes, list | tuple | range):
            raise TypeError(
                f"block_hashes of request {self.request_id!r} must be a list, not "
                f"{type(self.block_hashes).__name__}"
            )
        for name in ("cache_salt", "prefix_id", "block_hashes"):
            value = getattr(self, name)
            try:
                hash(tuple(value) if name == "block_hashes" else value)
            except TypeError as error:
                raise TypeError(f"{name} of request {self.request_id!r}: {error}") from error

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_kv_tokens(self) -> int:
        """Slots that it can ever need: the last sampled token never gets keys and values."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_live_tokens(self) -> int:
        """Tokens whose keys and values may still be read (in a static batch: not all of them)."""
        return self.num_computed_tokens

    @property
    def max_live_tokens(self) -> int:
        """As many as these can become."""
        return self.max_kv_tokens

    @property
    def came_to_its_end(self) -> str | None:
        """The finish_reason that its newest token gives: `stop`, `length` or None."""
        if self.num_output_tokens < 1:
            return None
        if self.token_ids is not None and self.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def recount(self):
        """Tokens are the truth: sets from them all that counts them, after a step that was cut
        short at any point. None of them is computed: their keys and values are forgotten."""
        if self.token_ids is not None:
            self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        runs = self.token_runs
        while sum(last - first + 1 for first, last in runs) > self.num_output_tokens:
            runs[-1][1] -= 1  # a step that was noted for a token that did not come
            if runs[-1][1] < runs[-1][0]:
                runs.pop()
        if not runs:
            self.first_token_time = None
        if self.finish_reason is None:
            self.finish_time = None

    def append(self, token_id):
        if self.token_ids is not None:
            self.token_ids.append(token_id)
        self.num_tokens += 1

    def __repr__(self):
        return (
            f"Request({self.request_id!r}, computed {self.num_computed_tokens} of "
            f"{self.num_tokens} tokens, {self.num_prompt_tokens} of them prompt)"
        )


@dataclass
class CompletionOutput:
    """One sample's output so far. `finish_reason`: None while it runs, then `stop` (an end token
    or a stop string), `length` (max_tokens or max_model_len), `abort` or `error`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """A snapshot of a request; later steps do not change it.

    metrics: a `RequestMetrics` for each entry of outputs.
    num_cached_tokens: prompt tokens that a prefix cache already held.
    error: what went wrong, where a finish_reason is `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: list = field(default_factory=list)
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Over all samples."""
        return sum(len(sample.token_ids) for sample in self.outputs)
