"""conversations.txt: what was asked, what was answered, and its reward, to be read."""

from itertools import groupby
from pathlib import Path

from chat.engine import Engine

from megatron_pg import Sample


class Transcript:
    """A text file that grows by every step's conversations.

    Args:
        path: the file; an earlier run's text stays before.
        engine: turns tokens into text.
    """

    def __init__(self, path: Path, engine: Engine):
        self._file, self._engine = open(path, "a", encoding="utf-8"), engine  # noqa: SIM115, closed with the process

    def write(self, samples: list[Sample], step: int) -> None:
        """The samples of a step, prompt by prompt; what the assistant did not write is in double brackets."""
        for prompt_id, group in groupby(samples, key=lambda sample: sample.prompt_id):
            group = list(group)
            prompt = group[0].tokens[: -group[0].response_length].tolist()
            self._file.write(f"\n=== step {step}, prompt {prompt_id}\n{self._engine.text_of(prompt)}\n")
            for sample in group:
                reward = "demonstration" if sample.reward is None else f"reward {sample.reward:g}"
                self._file.write(f"--- {reward}, {sample.num_trained} tokens{_cut(sample)}\n")
                self._file.write(self._response(sample) + "\n")
        self._file.flush()

    def _response(self, sample: Sample) -> str:
        pairs = zip(sample.tokens[-sample.response_length :].tolist(), sample.loss_mask.tolist(), strict=True)
        parts = []
        for is_trained, part in groupby(pairs, key=lambda pair: pair[1]):
            text = self._engine.text_of([token for token, _ in part]).strip()
            parts.append(text if is_trained else f"[[{text}]]")
        return "\n".join(parts)


def _cut(sample: Sample) -> str:
    return ", cut at the limit" if sample.truncated else ""
