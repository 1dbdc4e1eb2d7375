"""From flags or a launch script to the arguments that the startup checks read.

megatron_pg's own flags are parsed by its own parser. Of Megatron's hundreds of flags only those are read that a check
or the layout needs; whatever else the command holds belongs to other parsers and is left alone, as long as none of
it can hide one of ours.
"""

import argparse
import difflib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_pg.args import MEGATRON_ARGUMENTS, add_arguments, own_arguments
from megatron_pg.cli.shell import Command, Reading, read_commands
from megatron_pg.cli.shell_tokens import HOLE
from megatron_pg.cli.shell_values import Word
from megatron_pg.cli.terminal import InputError, show_path
from megatron_pg.rollouts.printable import printable

# Megatron's flags that a rule or the layout reads: attribute, and what argparse is told. A release may lack some.
MEGATRON_FLAGS: Mapping[str, dict] = {
    "calculate_per_token_loss": {"action": "store_true"},
    "context_parallel_size": {"type": int},
    "cross_entropy_loss_fusion": {"action": "store_true"},
    "cuda_graph_impl": {},
    "cuda_graph_modules": {"nargs": "+"},
    "cuda_graph_scope": {"nargs": "+"},
    "dataloader_type": {},
    "ddp_average_in_collective": {"action": "store_true"},
    "decrease_batch_size_if_needed": {"action": "store_true"},
    "defer_embedding_wgrad_compute": {"action": "store_true"},
    "fp16": {"action": "store_true"},
    "fp8_output_proj": {"action": "store_true"},
    "hybrid_context_parallel": {"action": "store_true"},
    "iterations_to_skip": {"nargs": "+", "type": int},
    "loss_scale": {"type": float},
    "moe_aux_loss_coeff": {"nargs": "+", "type": float},
    "moe_z_loss_coeff": {"type": float},
    "mtp_num_layers": {"type": int},
    "num_experts": {"type": int},
    "output_logit_dtype": {},
    "overlap_moe_expert_parallel_comm": {"action": "store_true"},
    "perform_rl_step": {"action": "store_true"},
    "sft": {"action": "store_true"},
    "tensor_model_parallel_size": {"type": int},
    "tensor_parallel_num_weight_shards": {"type": int},  # Megatron derives gtp_weight_remat_size from it
    "train_samples": {"type": int},
    "use_megatron_fsdp": {"action": "store_true"},
    "use_mup": {"action": "store_true"},
    "use_torch_fsdp2": {"action": "store_true"},
    "pipeline_model_parallel_size": {"type": int},
    "micro_batch_size": {"type": int},
    "global_batch_size": {"type": int},
    "rampup_batch_size": {"nargs": 3},
    "yaml_cfg": {},
}
# Flags with one value, a path or a number that scripts take from outside: what is not known there is taken as that value.
ONE_VALUE = {
    *(
        "--data-cache-path",
        "--load",
        "--log-interval",
        "--merge-file",
        "--moe-layer-freq",
        "--pretrained-checkpoint",
        "--save",
    ),
    *("--seed", "--seq-length", "--tensorboard-dir", "--tokenizer-model", "--train-iters"),
    *("--vocab-file", "--wandb-entity", "--wandb-exp-name", "--wandb-project", "--wandb-save-dir"),
}
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MENTIONING = {  # commands that may name a launcher, and start none
    *("echo", "printf", "which", "type", "hash", "pkill", "pgrep", "killall", "pip", "pip3", "ls", "cat", "grep"),
    *("sed", "awk", "tee", "test", "trap", "alias", "rm", "cp", "mv", "chmod", "mkdir", "touch", "git"),
}
# which may start what they are given
_SHELLS = {"eval", "bash", "sh", "zsh", "su", "ssh", "pdsh", "tmux", "screen", "sbatch"}
_LAUNCHING = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b|\bpython[\d.]*\s.*\.py\b")
_OURS = re.compile(r"--(pg-|loss-aggregation|custom-pg-)")


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch says: its arguments, and what reading it has shown."""

    args: argparse.Namespace
    source: str  # where the arguments come from, for a reader
    world_size: int | None
    others: tuple[str, ...]  # arguments that belong to other parsers
    environment: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()  # what is not known, and taken to hold no flag that is read


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. Correct the flag; megatron-pg explain --help lists those of megatron_pg.")


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommands that take a launch, and the flags of megatron_pg in their help."""
    name = parser.prog.split()[-1]
    parser.usage = f"{parser.prog} [options] [SCRIPT] [flags and arguments of the launch]"
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks, where the launch does not say it")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a shell variable of SCRIPT that cannot be known without running it; may be repeated",
    )
    parser.add_argument("--line", type=int, metavar="N", help="the line of SCRIPT whose command is meant, of several")
    shown = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    flags = add_arguments(shown).format_help().partition("\n")[2].strip()
    parser.epilog = (
        f"SCRIPT is a bash script that starts torchrun; it is read, never run. Examples:\n"
        f"  megatron-pg {name} launch.sh\n"
        f"  megatron-pg {name} --loss-aggregation constant --loss-aggregation-divisor 8192\n\n"
        f"flags of megatron_pg:\n  {flags}"
    )


def read_launch(options: argparse.Namespace, *, assume: bool = False) -> Launch:
    """The launch that a subcommand's words describe: flags, or a script and its arguments.

    Args:
        options: the subcommand's options, and its `words`.
        assume: that what comes from outside of the script, where an option may stand, holds no flag that is read;
            `assumed` names it. Without it such a word is an error. What the script itself writes is never assumed away.

    Raises:
        InputError: a flag is misspelt or malformed, or the script leaves open what the flags are.
    """
    words = [word for word in options.words if word != "--"]
    overrides = dict(_assignment(text) for text in options.set)
    if words and not words[0].startswith("-"):
        return _from_script(words[0], words[1:], overrides, options, assume)
    if overrides or options.line:
        raise InputError("--set and --line are for a launch script, and none is given. Give one, or leave them out.")
    if not words:
        raise InputError(
            "neither flags nor a launch script are given. Give one of them, for instance --loss-aggregation token_mean."
        )
    args, others, *_ = _parse([Word(text, "the command line") for text in words], assume=False)
    return Launch(args, "flags", options.world_size, others)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    try:
        shlex.split(value)  # as the elements of an array
    except ValueError:
        equals = ""
    if not equals or not name.isidentifier():
        raise InputError(
            f"--set {printable(text)} is not NAME=VALUE. Write for instance --set NUM_GPUS=8, or --set 'ARGS=--a 1 --b' for an array."
        )
    return name, value


def _from_script(
    path: str, arguments: list[str], overrides: dict[str, str], options: argparse.Namespace, assume: bool
) -> Launch:
    if not Path(path).is_file():
        raise InputError(f"{show_path(path)}: is no file, so there is no launch script. Flags begin with --.")
    reading = read_commands(path, arguments=arguments, overrides=overrides)
    try:
        command = _choose(reading, options.line)
        before, after = _split(command)
        args, others, taken, assumed = _parse(after, assume=assume)
    except InputError as error:
        raise InputError(f"{show_path(path)}: {error}") from error
    _fill_in(args)
    return Launch(
        args,
        f"{show_path(path)}, {command.where}",
        options.world_size or _world_size(before),
        others,
        tuple(sorted(reading.environment)),
        (*reading.caveats, *map(_not_read, filter(_runs_script, reading.commands)), *taken, *_reservations(command)),
        tuple(assumed),
    )


def _reservations(command: Command) -> list[str]:
    if command.is_certain:
        return []
    return [f"{command.where} is inside a branch or a loop; whether and how often it runs is not known"]


def _choose(reading: Reading, line: int | None) -> Command:
    found = list(dict.fromkeys(command for command in reading.commands if _starts_training(command)))
    hiding = [command for command in reading.commands if command not in found and _hides(command)]
    if line is None:
        candidates = [*(list(filter(_is_likely, found)) or found), *hiding]
    else:
        candidates = [command for command in found if command.where == f"line {line}"]
        if not candidates:
            raise InputError(f"no training is started in line {line}. Give the line where the command begins.")
    places = list(dict.fromkeys(command.where for command in candidates))
    if len(places) > 1:
        raise InputError(f"several commands start a training ({', '.join(places)}). Choose one with --line.")
    if len(candidates) > 1:
        raise InputError(
            f"{places[0]} starts a training {len(candidates)} times, with different arguments. Give the flags themselves."
        )
    if candidates and candidates[0] in found:
        return _followed(candidates[0])
    unread = [*hiding, *filter(_runs_script, reading.commands)]
    if unread:
        raise InputError(
            f"{_not_read(unread[0])}, and no other command starts a training. Give the script that it runs, or the flags themselves."
        )
    if reading.ended:
        raise InputError(
            f"{reading.ended}: the script ends itself here, before it starts a training. Give its arguments behind it, or the variables "
            "that it asks for with --set NAME=VALUE or in the environment."
        )
    raise InputError(
        "no command starts a training: neither torchrun nor python with a .py file. Give the flags themselves."
    )


def _is_launcher(word: Word) -> bool:
    return word.text.rpartition("/")[2] in _LAUNCHERS


def _is_likely(command: Command) -> bool:
    """Whether it is no mere tool: started by a launcher or by Ray, or with flags of ours."""
    is_ray = command.words[0].text.rpartition("/")[2] == "ray"
    return is_ray or any(_is_launcher(word) or _OURS.match(word.text) for word in command.words)


def _hides(command: Command) -> bool:
    """Whether a shell is given the text of a command that starts a training."""
    names = [word.text.rpartition("/")[2] for word in command.words]
    if names[0] in _MENTIONING:
        return False
    texts = [text for word in command.words for text in (word.text, *(each.text for each in word.holes))]
    texts.append(" ".join(word.text for word in command.words))
    if not _SHELLS & set(names):
        texts = [each.text for each in command.words[0].holes]
    return any(map(_LAUNCHING.search, texts))


def _runs_script(command: Command) -> bool:
    first, *rest = [word.text for word in command.words]
    is_shell = first.rpartition("/")[2] in ("bash", "sh", "zsh", "sbatch")
    return first.endswith(".sh") or (is_shell and any(text.endswith(".sh") for text in rest))


def _not_read(command: Command) -> str:
    shown = " ".join(word.text.replace(HOLE, "…") for word in command.words)
    return f"{command.where}: what `{printable(shown[:60])}` starts is not read"


def _followed(command: Command) -> Command:
    for word in command.words:
        name = word.text.rpartition("/")[2]
        if name in ("xargs", "parallel", "find"):
            raise InputError(
                f"{command.where}: `{name}` adds arguments to the training command, which are not known. Give the flags themselves."
            )
        if _is_launcher(word) or word.text.endswith(".py"):
            break
    return command


def _starts_training(command: Command) -> bool:
    names = [word.text.rpartition("/")[2] for word in command.words]
    is_text = _SHELLS & set(names) and any(re.fullmatch(r"-\w*c", name) for name in names)  # `bash -c '…'`
    if names[0] in _MENTIONING or names[0] == "eval" or (is_text and _hides(command)):
        return False
    runs_python = any(re.fullmatch(r"python[\d.]*", name) or HOLE in name for name in names)
    return any(name in _LAUNCHERS for name in names) or (runs_python and any(n.endswith(".py") for n in names))


def _split(command: Command) -> tuple[list[Word], list[Word]]:
    """What the launcher reads, and what the training script reads."""
    words = list(command.words)
    start = next((i + 1 for i, word in enumerate(words) if _is_launcher(word)), 0)
    for i, word in enumerate(words[start:], start=start):
        if start and word.text in ("-m", "--module"):
            return words[start:i], words[i + 2 :]
        if word.text.endswith(".py"):
            return words[start:i], words[i + 1 :]
    return words[start:], words[start:]


def _parse(words: list[Word], *, assume: bool) -> tuple[argparse.Namespace, tuple[str, ...], list[str], list[str]]:
    parser = add_arguments(_Parser(prog="the launch", allow_abbrev=False, add_help=False))
    own = set(parser._option_string_actions)
    aggregation = parser._option_string_actions["--loss-aggregation"]
    aggregation.choices = None  # rule E3 refuses, and says what another framework's word is here
    for name, keywords in MEGATRON_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **keywords)
    read = parser._option_string_actions
    taken, assumed = _check_branches(words, set(read)), {}
    for i, word in enumerate(words):
        if word.holes:
            _check_unknown(words[:i], word, read, taken, assumed if assume else None)
    args, others = parser.parse_known_args([word.text for word in words])
    _check_spelling(others, own)
    if "yaml_cfg" in args:
        raise InputError(
            "--yaml-cfg replaces all flags by those of a YAML file, which is not read here. Give the flags themselves."
        )
    return args, tuple(word.replace(HOLE, "…") for word in others), list(dict.fromkeys(taken)), list(assumed.values())


def _check_unknown(
    before: list[Word],
    word: Word,
    read: Mapping[str, argparse.Action],
    taken: list[str],
    assumed: dict[str, str] | None,
) -> None:
    """Add what is taken for granted about a word that is not known; an error where it may be, or belong to, a flag that is read."""
    last, flag = before[-1].text if before else "", word.text.partition("=")[0]
    written = next((name for each in word.holes for name in re.findall(r"--[\w-]+", each.text) if name in read), None)
    could_be_flag = word.text.startswith(HOLE) or word.many
    if flag in read or _is_value(before, read) or (flag.startswith("-") and HOLE in flag):
        why = "it decides a flag that is read"
    elif not could_be_flag or not (written or any(each.is_open for each in word.holes)):
        return
    elif written:
        why = f"{written} may be in it"
    elif last in ONE_VALUE:
        taken.append(f"taken as the one value of {last}, because it is not known: {word.unknown}")
        return
    elif assumed is not None:
        assumed |= {each.reason: str(each) for each in word.holes if each.is_open and each.reason not in assumed}
        return
    else:
        why = "a flag could hide there"
    place = f" after {printable(last.replace(HOLE, '…'))}" if last else ""
    raise InputError(
        f"{word.where}: the argument{place} is not known, and {why}, because {word.unknown}. Give the variable with "
        "--set NAME=VALUE, or in the environment."
    )


def _is_value(before: list[Word], read: Mapping[str, argparse.Action]) -> bool:
    """Whether the next word would be, or might be, a value of a flag that is read."""
    for distance, word in enumerate(reversed(before)):
        if word.text.startswith("--"):
            nargs = read[word.text].nargs if word.text in read else 0
            return nargs != 0 and (distance == 0 or nargs is not None)
    return False


def _check_branches(words: list[Word], read: set[str]) -> list[str]:
    """What is passed only where a branch is taken, none of which may be a flag that is read, or its value."""
    taken = []
    for before, word in zip([Word("", ""), *words], words, strict=False):
        if word.maybe is None:
            continue
        is_value = not word.text.startswith("-")
        if word.text.partition("=")[0] in read or (is_value and before.maybe is None):
            raise InputError(
                f"{word.maybe.where}: {printable(word.text)} is passed {word.maybe.reason}, and whether it is cannot be known without running "
                "the script. Take it out of the branch, or give the flags themselves."
            )
        if not is_value:
            taken.append(f"{word.maybe.where}: {printable(word.text)} is passed {word.maybe.reason}")
    return taken


def _check_spelling(others: Sequence[str], own: set[str]) -> None:
    for word in others:
        flag = word.partition("=")[0]
        if re.match(r"[\u2010-\u2015\u2212]", flag):
            raise InputError(f"{printable(word)} begins with a dash that is no hyphen, so it is no flag. Write --.")
        if not flag.startswith("--"):
            continue
        others_too = {
            name for name in own if name == f"--pg-{flag[2:]}"
        }  # --vocab-size is not a misspelt --pg-vocab-size
        close = difflib.get_close_matches(flag.replace("_", "-"), own - others_too, n=1, cutoff=0.9)
        if _OURS.match(flag) or close:
            guess = close or difflib.get_close_matches(flag, own, n=1, cutoff=0.5)
            hint = f" Did you mean {guess[0]}?" if guess else ""
            raise InputError(
                f"{printable(flag)} is no flag of megatron_pg, so training would not start or would ignore it.{hint}"
            )


def _fill_in(args: argparse.Namespace) -> None:
    """What Megatron derives from its flags before the checks run."""
    found = vars(args)
    found.setdefault("dataloader_type", "single")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        found.setdefault(name, 1)
    if shards := found.get("tensor_parallel_num_weight_shards"):
        args.gtp_weight_remat_size = shards // max(args.tensor_model_parallel_size, 1)


def _world_size(words: Sequence[Word]) -> int | None:
    """Ranks that torchrun's options name, where they are numbers."""
    sizes = {"nproc-per-node": None, "nnodes": 1}
    parts = [
        (part, word.maybe)
        for word in words
        for part in (word.text.split("=", 1) if HOLE not in word.text else [word.text])
    ]
    for (flag, unsure), (value, unsure_too) in itertools.pairwise(parts):
        short = flag[2:].replace("_", "-")  # argparse takes the beginning of a name for it
        for name in sizes if flag.startswith("--n") else ():
            if name.startswith(short):
                sizes[name] = None if unsure or unsure_too or not value.isdecimal() else int(value)
    options = zip([Word("", ""), *words], words, strict=False)
    may_hold_more = any(word.many and not before.text.startswith("-") for before, word in options)
    if may_hold_more or None in sizes.values():
        return None
    return sizes["nproc-per-node"] * sizes["nnodes"]


def read_arguments(launch: Launch) -> dict[str, object]:
    """Every flag that was read, with its value, for a machine."""
    names = [*own_arguments(), *MEGATRON_ARGUMENTS, *MEGATRON_FLAGS]
    return {name: vars(launch.args)[name] for name in dict.fromkeys(names) if name in vars(launch.args)}
