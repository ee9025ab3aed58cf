"""Token ids to text, while they come."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens, in pieces that never change afterwards.

    A character may be spread over several tokens, and a token's text may depend on its neighbour,
    so the last few tokens are decoded together with the new ones and only what they add is taken
    (the way of Hugging Face's text-generation-inference, and of vLLM after it).

    stop: strings that end the output. Text that might be the beginning of one is held back, so
    that a piece once given out never has to be taken back.
    """

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""  # all complete characters so far, cut before a stop string
        self.stopped = False
        self._token_ids = []
        self._prefix = self._read = 0  # tokens before _read are in the text already
        self._num_given = 0

    def append(self, token_ids) -> bool:
        """Takes new tokens; returns whether a stop string is now in the text."""
        for token_id in token_ids:
            if self.stopped:
                break
            self._token_ids.append(token_id)
            self._read_on(final=False)
        return self.stopped

    def finish(self) -> None:
        """No token follows: an incomplete character comes out as U+FFFD."""
        self._read_on(final=True)

    def next_piece(self, final: bool) -> str:
        """The text since the last call that can no longer change; all of it at the end."""
        end = len(self.text)
        if not final and self.stop and not self.stopped:
            end = max(self._num_given, end - self._num_held_back())
        piece, self._num_given = self.text[self._num_given : end], end
        return piece

    def _num_held_back(self):
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self.stop)) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-n:]) for stop in self.stop):
                return n
        return 0

    def _read_on(self, final):
        before = self._decode(self._token_ids[self._prefix : self._read])
        text = self._decode(self._token_ids[self._prefix :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return
        searched_from = max(0, len(self.text) - max(map(len, self.stop), default=0) + 1)
        self.text += text[len(before) :]
        self._prefix, self._read = self._read, len(self._token_ids)
        found = [self.text.find(stop, searched_from) for stop in self.stop]
        found = [at for at in found if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _decode(self, token_ids):
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
