"""NeMo-RL's adapter against stand-ins with its interfaces; `test_nemo_rl_checkout` has NeMo-RL itself."""

import pickle
import sys
from pathlib import Path

import nemo_oracle
import nemo_stand_in
import pytest
import torch
from host_cases import error as host_error
from host_cases import inherited_flags, refused_flags
from nemo_oracle import BETA, CAP, DIVISOR, HIGH, PLAIN, TIS, Case
from nemo_stand_in import Options, master_config

from megatron_pg import ArgumentError
from megatron_pg.hosts.nemo_rl import flags as nemo_flags
from megatron_pg.hosts.nemo_rl.loss import checked
from megatron_pg.hosts.step import HostLossError
from megatron_pg.nemo_rl import PolicyGradientLossFn, install, main
from megatron_pg.plan.errors import NonFiniteLossError, StepPlanError

pytestmark = pytest.mark.filterwarnings("ignore::megatron_pg.ArgumentWarning")  # about a reducer, and about gspo's clip


@pytest.fixture(autouse=True)
def nemo(monkeypatch):
    """Stand-ins, with ours in their places."""
    nemo_stand_in.install(monkeypatch)
    install()


def policy(*, packed: bool = False, steps: int = 1) -> nemo_stand_in.Policy:
    from nemo_rl.models.policy.lm_policy import Policy

    return Policy(packed=packed, rows_per_step=len(nemo_oracle.LENGTHS) // steps)


def train(
    options: Options, *, packed: bool = False, steps: int = 1, rows: dict | None = None, logprobs: bool = False
) -> tuple[list, dict]:
    driver, loss = policy(packed=packed, steps=steps), PolicyGradientLossFn(options)
    if logprobs:
        loss.take_logprobs()
    data = nemo_oracle.with_holes(nemo_oracle.batch()) if rows is None else rows
    names = set(data)
    results = driver.train(data, loss)
    assert set(data) == names  # what travelled with the rows is gone
    return driver.steps, {name: sum(values) for name, values in results["all_mb_metrics"].items()}


def expected(case: Case, steps: int = 1) -> list[nemo_oracle.Found]:
    size, data = len(nemo_oracle.LENGTHS) // steps, nemo_oracle.batch()
    cuts = [nemo_oracle.rows_of(data, k * size, (k + 1) * size) for k in range(steps)]
    return [nemo_oracle.oracle(policy().parameters, rows, case) for rows in cuts]


def error(found: list, wanted: list[nemo_oracle.Found]) -> float:
    return max(host_error(step, of_step.gradients) for step, of_step in zip(found, wanted, strict=True))


CASES = {
    "sample_mean, cispo + TIS": (
        {"loss_aggregation": "sample_mean"},
        {"use_cispo": True, "ratio_clip_max": CAP - 1, **TIS},
        Case("sample_mean", "cispo", tis=True),
    ),
    "prompt_mean, gspo": (
        {"loss_aggregation": "prompt_mean"},
        {"sequence_level_importance_ratios": True},
        Case("prompt_mean", "gspo"),
    ),
    "token_mean, grpo": ({}, {}, Case("token_mean")),
    "constant, grpo + KL": (
        {"loss_aggregation": "constant", "loss_aggregation_divisor": DIVISOR, "pg_kl_estimator": "k3"},
        {"reference_policy_kl_penalty": BETA},
        Case("constant", kl="k3"),
    ),
    "a reducer of the user's": (
        {"custom_pg_loss_reducer_function_path": "megatron_pg.cp_utils:get_sum_of_sample_mean"},
        {},
        Case("sample_mean"),
    ),
}


@pytest.mark.parametrize("kind", ["padded", "packed", "log-probabilities"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_metrics_are_those_of_plain_loops(name, kind):
    """From logits, or from NeMo-RL's log-probabilities as with fuse_loss, a draft model, top_k or top_p."""
    ours, theirs, case = CASES[name]
    steps = 2 if kind == "packed" else 1
    options = Options(**PLAIN | theirs, megatron_pg=ours)
    found, logged = train(options, packed=kind == "packed", steps=steps, logprobs=kind == "log-probabilities")
    wanted = expected(case, steps)
    assert error(found, wanted) < 1e-6
    for name in ("loss", "num_valid_samples", "token_mult_prob_error", "gen_kl_error", "js_divergence_error"):
        mean = sum(step.metrics[name] for step in wanted) / steps
        assert logged[name] == pytest.approx(mean, rel=1e-5)
    if steps == 1:
        for name in ("pg_loss", "new_logprobs", "ratio_new_old", "kl_new_old", "num_tokens"):
            assert logged[f"pg/{name}"] == pytest.approx(wanted[0].metrics[name], rel=1e-5)
    assert not [name for name in logged if "sum/" in name or name == "pg/max_advantage"]


def test_what_is_written_over_one_packed_sequence_is_no_change_of_the_next():
    options = Options(**PLAIN, sequence_level_importance_ratios=True, megatron_pg={"pg_kernel": "triton"})
    rows = {name: values[[0, 2, 7, 11]] for name, values in nemo_oracle.batch().items()}  # short ones
    found, _ = train(options, packed=True, steps=4, rows=rows)
    wanted = nemo_oracle.oracle(policy().parameters, nemo_oracle.rows_of(rows, 0, 4), Case("token_mean", "gspo"))
    assert error(found, [wanted]) < 1e-6


def test_their_options_alone_make_their_gradient():
    """NeMo-RL multiplies k3 by π / sg(π): the gradient is x = log π - log π_ref, which is k2's."""
    found, logged = train(Options(ratio_clip_max=HIGH, reference_policy_kl_penalty=BETA))
    wanted = expected(Case("token_mean", kl="k2", kl_mode="token_mean"))
    assert error(found, wanted) < 1e-6
    assert logged["pg/kl_loss"] == pytest.approx(wanted[0].metrics["kl_loss"], rel=1e-5)


OWN = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "sampling_importance_ratio")


@pytest.mark.parametrize(("theirs", "tis"), [({}, False), (TIS, True), ({"ratio_clip_c": 3.0}, False)])
def test_a_forced_ratio_is_one_and_corrections_are_of_the_current_policy(theirs, tis):
    rows = nemo_oracle.with_holes(nemo_oracle.batch())
    rows["prev_logprobs"].zero_()  # as NeMo-RL does without the pass
    found, logged = train(Options(**PLAIN, **theirs, force_on_policy_ratio=True), rows=rows)
    (wanted,) = expected(Case("token_mean", tis=tis, on_policy=True))
    assert error(found, [wanted]) < 1e-6
    for key in ("loss", "pg/pg_loss", "pg/ratio_new_old", *OWN, *(("pg/correction_factor",) if tis else ())):
        assert logged[key] == pytest.approx(wanted.metrics[key.removeprefix("pg/")], rel=1e-5), key


def test_settings_with_which_nemo_rl_computes_log_probabilities_are_taken_over(capsys):
    from nemo_rl.algorithms.grpo import setup

    fused = {"megatron_cfg": {"enabled": True, "use_fused_linear_logprobs": True}}
    for section in (fused, {"sequence_packing": {"fuse_loss": True}}, {"draft": {"enabled": True}}):
        assert setup(master_config(Options(), **section), None, None, None)[1].input_type.name == "LOGPROB"
    assert "NeMo-RL's own, for policy.draft.enabled" in capsys.readouterr().out
    cut = {"generation": {"top_k": 50, "top_p": 0.9}}
    loss = setup(master_config(Options(reference_policy_kl_penalty=0.0), **cut), None, None, None)[1]
    assert loss.input_type.name == "LOGPROB"
    assert setup(master_config(Options()), None, None, None)[1].input_type.name == "LOGIT"
    config = master_config(Options(megatron_pg={"pg_kernel": "triton"}), sequence_packing={"fuse_loss": True})
    with pytest.raises(ArgumentError, match=r"--pg-kernel triton reads logits, and .*sequence_packing\.fuse_loss"):
        setup(config, None, None, None)


def test_a_prompt_whose_rows_are_all_left_out_is_not_counted():
    rows = nemo_oracle.batch()
    rows["sample_mask"][4:8] = 0.0
    found, logged = train(Options(**PLAIN, megatron_pg={"loss_aggregation": "prompt_mean"}), rows=rows)
    wanted = nemo_oracle.oracle(policy().parameters, nemo_oracle.rows_of(rows, 0, 16), Case("prompt_mean"))
    assert error(found, [wanted]) < 1e-6
    assert logged["pg/num_prompts"] == 3


def test_the_loss_travels_as_plain_values():
    loss = PolicyGradientLossFn(Options(**PLAIN))
    assert loss.planning.aggregation == "token_mean"
    content = pickle.dumps(loss)
    assert b"LossSettings" not in content
    assert pickle.loads(content).settings.aggregation == "token_mean"


def test_other_losses_pass_unchanged():
    class Mean:
        def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
            assert not [name for name in data if name.startswith("megatron_pg")]
            return logits.mean(), {"loss": 0.0}

    sys.modules["__main__"].Mean = Mean  # where pickle looks for it
    Mean.__module__, Mean.__qualname__ = "__main__", "Mean"
    assert set(policy().train(nemo_oracle.batch(), Mean())["all_mb_metrics"]) == {"loss"}
    del sys.modules["__main__"].Mean


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (None, r"^the rows have no megatron_pg_weights, which the driver's Policy\.train passes on\. Run"),
        ("generation_logprobs", "the rows have no generation_logprobs"),
    ],
)
def test_a_worker_refuses_rows_that_no_driver_has_planned_or_without_what_the_loss_reads(absent, message):
    loss, rows = PolicyGradientLossFn(Options(**PLAIN)), nemo_oracle.batch()
    rows.pop(absent, None)
    logits = torch.zeros(16, nemo_oracle.WIDTH, nemo_oracle.VOCABULARY)
    with pytest.raises(ValueError, match=message):
        loss(logits=logits, data=rows, global_valid_seqs=None, global_valid_toks=None)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda rows: rows["sample_mask"].fill_(0.5), ValueError, "sample_mask of row 0 is 0.5"),
        (lambda rows: rows["token_mask"].zero_(), StepPlanError, "no trained token"),
        (lambda rows: rows["prev_logprobs"].fill_(torch.nan), ValueError, "old_logprobs"),
    ],
)
def test_rows_that_mean_nothing_are_refused_before_training(change, error, words):
    rows = nemo_oracle.batch()
    change(rows)
    with pytest.raises(error, match=words):
        train(Options(**PLAIN), rows=rows)


def test_a_loss_that_is_not_finite_ends_the_run():
    driver = policy()
    with torch.no_grad():
        driver.parameters[0].fill_(torch.nan)
    with pytest.raises(NonFiniteLossError, match=r"non-finite loss at .* trained tokens"):
        driver.train(nemo_oracle.batch(), PolicyGradientLossFn(Options(**PLAIN)))


@pytest.mark.parametrize(("given", "message"), refused_flags("nemo_rl"))
def test_options_that_contradict_are_refused_by_name(given, message):
    """`tis` is short for the options of a truncated correction of that type."""
    given = dict(given)
    kind = given.pop("tis", None)
    with pytest.raises(ArgumentError) as refused:
        checked(Options(**(TIS | {"truncated_importance_sampling_type": kind} if kind else {}) | given))
    assert message in str(refused.value)


@pytest.mark.parametrize(("section", "message"), refused_flags("nemo_rl, policy"))
def test_the_policys_configuration_is_checked_before_setup(section, message):
    from nemo_rl.algorithms.grpo import setup

    with pytest.raises(ArgumentError) as refused:
        setup(master_config(Options(megatron_pg={"loss_aggregation": "prompt_mean"}), **section), None, None, None)
    assert message in str(refused.value)


def test_a_trainer_that_makes_their_loss_is_refused(monkeypatch):
    nemo_stand_in.install(monkeypatch)
    from nemo_rl.algorithms.grpo import ClippedPGLossFn  # as another module has it by then

    install()
    with pytest.raises(ArgumentError, match="instead of megatron_pg's loss"):
        ClippedPGLossFn(Options())


def test_the_rest_of_the_configuration_is_checked():
    config = master_config(Options(megatron_pg={"loss_aggregation": "prompt_mean"}), train_global_batch_size=6)
    config.grpo, config.data_plane = vars(config.grpo), {"enabled": True}  # in v0.7.0 a dict
    group, plane = nemo_flags.refused_of_policy(config)
    assert "cuts the samples of a prompt into several steps" in group
    assert "data_plane.enabled" in plane


@pytest.mark.parametrize(("given", "ours", "text"), inherited_flags("nemo_rl"))
def test_options_of_nemo_rl_are_inherited(given, ours, text):
    """Those of a newer release at their defaults are accepted."""
    args, rows = checked(Options(**given))
    assert {name: getattr(args, name) for name in ours} == ours
    assert text in rows.get("inherited", "")


def test_a_second_install_changes_nothing():
    import nemo_rl.algorithms.grpo as grpo
    from nemo_rl.models.policy.lm_policy import Policy

    found = grpo.setup, grpo.ClippedPGLossFn, Policy.train
    install()
    assert found == (grpo.setup, grpo.ClippedPGLossFn, Policy.train)
    assert PolicyGradientLossFn(Options(**PLAIN)).args.pg_objective == "grpo"


def test_a_setup_that_makes_another_loss_is_refused(monkeypatch):
    nemo_stand_in.install(monkeypatch)
    import nemo_rl.algorithms.grpo as grpo

    monkeypatch.setattr(grpo, "setup", lambda master_config: (None, "their loss", None))
    install()
    with pytest.raises(HostLossError, match="setup has made another loss than megatron_pg's"):
        grpo.setup(master_config(Options()))


def test_workers_that_train_another_loss_are_noticed_after_their_first_step(monkeypatch):
    nemo_stand_in.install(monkeypatch)
    from nemo_rl.models.policy.lm_policy import Policy

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None):
        return {"all_mb_metrics": {"loss": [0.1]}}

    monkeypatch.setattr(Policy, "train", train)
    install()
    with pytest.raises(HostLossError, match="workers have trained with another loss"):
        policy().train(nemo_oracle.batch(), PolicyGradientLossFn(Options(**PLAIN)))


def test_a_first_token_that_the_mask_names_is_not_trained():
    """No logits predict it, and NeMo-RL does not count it."""
    rows = nemo_oracle.batch()
    wanted = [nemo_oracle.oracle(policy().parameters, nemo_oracle.rows_of(rows, 0, 16), Case("sample_mean"))]
    rows["token_mask"][:, 0] = 1.0
    found, logged = train(Options(**PLAIN, megatron_pg={"loss_aggregation": "sample_mean"}), rows=rows)
    assert error(found, wanted) < 1e-6
    assert logged["pg/num_tokens"] == pytest.approx(wanted[0].metrics["num_tokens"])


def test_a_configuration_of_another_release_is_named():
    options = Options()
    del options.use_cispo
    with pytest.raises(ArgumentError, match="loss_fn has no use_cispo, as in NeMo-RL 7ea279ab"):
        checked(options)


def test_another_signature_is_named_before_training(monkeypatch):
    from nemo_rl.models.policy.lm_policy import Policy

    monkeypatch.setattr(Policy, "train", lambda self, batch, loss: None)
    with pytest.raises(
        ArgumentError, match=r"lm_policy:Policy\.train takes \(self, batch, loss\), .* NeMo-RL 7ea279ab"
    ):
        install()


def test_the_launcher_runs_a_script_with_our_loss(tmp_path: Path, capsys, monkeypatch):
    nemo_stand_in.install(monkeypatch)  # as it is without ours
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        "from nemo_rl.algorithms.grpo import setup\n"
        "from nemo_stand_in import Options, master_config\n"
        "options = Options(use_cispo=True, megatron_pg={'loss_aggregation': 'prompt_mean'})\n"
        "_, loss, _ = setup(master_config(options), None, None, None)\n"
        "kinds = loss.input_type.name, loss.loss_type.name\n"
        "print(type(loss).__name__, loss.args.loss_aggregation, *kinds, *sys.argv[1:])\n"
    )
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main([str(script), "--config", "x.yaml"])
    shown = capsys.readouterr().out
    assert "PolicyGradientLossFn prompt_mean LOGIT SEQUENCE_LEVEL --config x.yaml" in shown
    assert "loss_fn.use_cispo is --pg-objective cispo" in shown
    assert "loss_fn.ratio_clip_max + 1 is --pg-objective …,cap=1.2" in shown
    assert "token_level_loss: the aggregation is given" in shown
