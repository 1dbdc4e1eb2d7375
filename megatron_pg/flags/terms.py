"""The rules of loss terms, `--pg-term NAME:kind[,option=value]…`, and of sampling masks. Needs no torch."""

from collections.abc import Sequence

from megatron_pg.declarations.declaration import flag_of
from megatron_pg.declarations.loss_terms import AS_POLICY, LossTerm
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.table import DEFAULTS, word_rules
from megatron_pg.rollouts.fields import POLICY

_DROPPED = f"--pg-term {POLICY}:{POLICY},weight=0"  # the flag that drops the objective
_OF_OBJECTIVE = (  # arguments that nothing but the objective reads
    *("pg_objective", "pg_custom_objective_path", "custom_pg_loss_reducer_function_path"),
    *("pg_correction", "pg_denominator"),
)


def term_violations(facts: Facts) -> Violations:
    """Rules E71 of one loss term, E72 of several, E73 of flags that they cannot be combined with."""
    texts = facts.args.pg_term
    if texts is None:
        return
    if not isinstance(texts, (list, tuple)) or not texts:
        yield f"E71 --pg-term is {texts!r}. It must be a list of texts, one for each loss term."
        return
    for text, error in facts.wrong_terms:
        yield f"E71 --pg-term {text} {error}"
    if not facts.wrong_terms:
        terms = facts.given_terms
        yield from _hidden_rules(facts, terms)
        yield from _contradictions(terms)
        yield from _together(facts, terms)


def _hidden_rules(facts: Facts, terms: Sequence[LossTerm]) -> Violations:
    """Rules of a teacher over the whole vocabulary: its output layer, and the fused head of the model."""
    readers = [term for term in terms if term.reads_hidden and term.weight]
    for term in readers:
        if term.head is None:
            yield (
                f"E73 {term.flag} computes the teacher's logits from its hidden states. Add the option head=PATH, the "
                "teacher's output layer."
            )
        if not facts.fuses_head:
            yield (
                f"E73 {term.flag} needs the fused head, which computes the logits of teacher and model in chunks. Add "
                "--pg-fused-head forward or recompute."
            )
        if len({(each.kind, each.mixture, each.head, each.softcap) for each in (term, readers[0])}) > 1:
            yield (
                f"E73 {term.flag} and {readers[0].flag} differ in divergence or teacher, and one forward pass computes "
                "one of them. Give both the same kind, beta, head and softcap."
            )
        for other in (term for term in terms if term.reads_topk and term.weight):
            yield (
                f"E73 {term.flag} reads the teacher's whole vocabulary and {other.flag} its top-k tokens, and one "
                "forward pass can read only one of them. Remove one of the two."
            )


def _contradictions(terms: list[LossTerm]) -> Violations:
    names, with_tokens = [term.name for term in terms], {POLICY} | {term.name for term in terms if term.on is None}
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"E72 --pg-term {name} is given {names.count(name)} times. Give each loss term its own name."
    for term in terms:
        if term.on in names and term.on not in with_tokens:
            yield f"E72 {term.flag} has on={term.on}, which uses the tokens of another loss term. Name that loss term."
        elif term.on is not None and term.on not in with_tokens:
            yield (
                f"E72 {term.flag} has on={term.on}, which is not a loss term. Choose "
                f"{' or '.join(sorted(with_tokens))}."
            )


def _together(facts: Facts, terms: list[LossTerm]) -> Violations:
    """Rule E73 for loss terms together with other flags."""
    for term in terms:
        temperature = 1.0 if term.temperature is None else term.temperature
        if term.reads_topk and temperature != facts.args.pg_temperature:
            yield (
                f"E73 {term.flag} has a teacher at temperature {temperature:g}, and --pg-temperature is "
                f"{facts.args.pg_temperature}. Top-k log-probabilities cannot be converted between temperatures. "
                "Record the teacher at this temperature and pass temperature=…."
            )
    if facts.has_objective:
        return
    for term in terms:
        if term.aggregation == AS_POLICY:
            uses = f"{term.flag},aggregation={AS_POLICY} uses the weights of the objective"
            yield f"E73 {uses}, which {_DROPPED} drops. Name an aggregation."
    if not any(term.weight for term in terms):
        yield f"E73 {_DROPPED} leaves no loss. Add another loss term, or remove it."
    for name in _OF_OBJECTIVE:
        value = facts.selected_correction.name if name == "pg_correction" else vars(facts.args)[name]
        if value != DEFAULTS[name]:
            unread = f"{flag_of(name)} {value} has no effect without the objective"
            yield f"E73 {unread}, which {_DROPPED} drops. Remove one of the two."
    if facts.args.pg_kl_coef or facts.has_entropy_term:
        yield (
            "E73 --pg-kl-coef, --pg-entropy-coef and --pg-entropy-target are about terms of the objective, which "
            f"{_DROPPED} drops. Write --pg-term NAME:kl,on={POLICY} or NAME:entropy,on={POLICY}."
        )


def sampling_mask_violations(facts: Facts) -> Violations:
    """Rules E25 and E40 for samples with a sampling mask."""
    args = facts.args
    yield from word_rules(args, "--pg-sampling-mask-missing", "--pg-sampling-mask-entropy")
    if args.pg_sampling_mask_entropy == "kept" and not _reads_entropy(facts):
        yield (
            "E40 --pg-sampling-mask-entropy kept has no effect without an entropy. Remove it, or give "
            "--pg-entropy-coef, a --pg-term of the kind entropy or --pg-metrics with_entropy."
        )


def _reads_entropy(facts: Facts) -> bool:
    if facts.has_entropy_term or facts.args.pg_metrics == "with_entropy" or facts.wrong_terms:
        return True
    return any(term.kind == "entropy" and term.weight for term in facts.given_terms)
