"""examples/train_grpo.py with every second step run twice by Megatron's rerun machinery, as after a result that it
doubts.

No replayed step may count its documents twice or take others.
"""

import itertools

import train_grpo
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from megatron_pg.step.forward_step import PolicyGradientStep

forward_backward = PolicyGradientStep.forward_backward
seen = []  # (iteration, documents) of every forward-backward


def doubted(self, *positional, **keywords):
    losses = forward_backward(self, *positional, **keywords)
    machine = get_rerun_state_machine()
    seen.append((machine.current_iteration, self.documents.position))
    if machine.state == RerunState.INITIAL_RUN and machine.current_iteration % 2:
        machine.rerun_requested = machine.continue_requested = True
    return losses


PolicyGradientStep.forward_backward = doubted

if __name__ == "__main__":
    train_grpo.main()
    again = [after for before, after in itertools.pairwise(seen) if after == before]
    print(f"{len(again)} steps were run again", flush=True)
