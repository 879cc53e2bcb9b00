"""A scenario file: who wins over whom, what is refused and with which words, and that a saved one is the same run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError, known_keys, preset_keys
from hbmtwin.sim.sections import Section
from hbmtwin.sim.sizes import parse_bytes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(
        'seed = 4\n[engine]\nmax_model_len = 512\n[kv_cache]\ngrowth = "static"\ntensors = "merged"\n'
        "[scheduler]\nmax_num_seqs = 7\n"
    )
    return path


def complaint(*overrides: str, preset: str | None = None, path: Path | None = None) -> str:
    with pytest.raises(ScenarioError) as caught:
        Scenario.load(path, overrides=overrides, preset=preset)
    return str(caught.value)


# -- who wins --------------------------------------------------------------------------------------------------------


def test_defaults_stand_where_nothing_is_said() -> None:
    scenario = Scenario.load()
    assert (scenario.seed, scenario.model.name, scenario.device.name) == (0, "llama-2-7b", "ascend-910b4")
    assert (scenario.kv_cache.preset, scenario.kv_cache.policy, scenario.memory.oom) == ("paged", "paged", "preempt")
    assert (scenario.engine.max_model_len, scenario.scheduler.max_num_seqs) == (None, 256)


def test_file_over_defaults_preset_over_file_set_over_preset(file: Path) -> None:
    from_file = Scenario.load(file)
    assert (from_file.seed, from_file.engine.max_model_len, from_file.scheduler.max_num_seqs) == (4, 512, 7)
    assert (from_file.kv_cache.growth, from_file.kv_cache.tensors, from_file.kv_cache.preset) == (
        "static",
        "merged",
        None,
    )
    preset = Scenario.load(file, preset="caching")
    assert (preset.kv_cache.growth, preset.kv_cache.tensors, preset.kv_cache.preset) == (
        "exact",
        "per_layer",
        "caching",
    )
    assert preset.engine.max_model_len == 512  # which the preset does not govern
    changed = Scenario.load(file, preset="caching", overrides=["kv_cache.tensors=merged", "engine.max_model_len=256"])
    assert (changed.kv_cache.growth, changed.kv_cache.tensors) == ("exact", "merged")
    assert changed.engine.max_model_len == 256


def test_a_preset_of_the_file_wins_over_its_keys_too(file: Path) -> None:
    file.write_text('[kv_cache]\npreset = "doubling"\ngrowth = "exact"\ninitial_tokens = 16\n')
    scenario = Scenario.load(file)
    assert (scenario.kv_cache.growth, scenario.kv_cache.tensors, scenario.kv_cache.initial_tokens) == (
        "doubling",
        "merged",
        16,
    )
    assert Scenario.load(file, preset="paged").kv_cache.policy == "paged"
    assert Scenario.load(file, overrides=["kv_cache.preset=pooled"]).memory.kv_arena == "pooled"


def test_a_preset_by_name_and_another_one_by_set_contradict_each_other() -> None:
    said = complaint("kv_cache.preset=caching", preset="paged")
    assert said == "kv_cache.preset: --set says 'caching' where 'paged' is to run; leave it out of --set"
    assert Scenario.load(overrides=["kv_cache.preset=caching"], preset="caching").kv_cache.preset == "caching"


def test_without_a_preset_a_governed_key_stands_alone() -> None:
    scenario = Scenario.load(overrides=["kv_cache.policy=contiguous"])
    assert (scenario.kv_cache.preset, scenario.kv_cache.policy, scenario.memory.oom) == (None, "contiguous", None)


def test_a_changed_preset_does_not_keep_its_name() -> None:
    assert Scenario.load(preset="caching", overrides=["seed=2"]).kv_cache.preset == "caching"
    assert Scenario.load(preset="caching", overrides=["kv_cache.tensors=per_layer"]).kv_cache.preset == "caching"
    assert Scenario.load(preset="caching", overrides=["kv_cache.tensors=merged"]).kv_cache.preset is None


def test_the_seed_of_the_command_wins() -> None:
    assert Scenario.load(overrides=["seed=5"], seed=9).seed == 9
    assert Scenario.load(seed=2**63 - 1).seed == 2**63 - 1


def test_the_last_of_two_sets_counts_and_bare_words_need_no_quotes() -> None:
    scenario = Scenario.load(
        overrides=["seed=1", "model.name=llama-3.1-8b", " seed = 3 ", 'device.name="ascend-910b2"']
    )
    assert (scenario.seed, scenario.model.name, scenario.device.name) == (3, "llama-3.1-8b", "ascend-910b2")


def test_a_set_reaches_into_a_table(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[workload]\nprompt_tokens = {distribution = "uniform", low = 1, high = 9}\n')
    scenario = Scenario.load(path, overrides=["workload.prompt_tokens.high=20"])
    assert scenario.workload.prompt_tokens == {"distribution": "uniform", "low": 1, "high": 20}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("engine.max_modl_len=5", "engine.max_modl_len: unknown key; did you mean 'engine.max_model_len'?"),
        ("enigne.max_model_len=5", "enigne: unknown key; did you mean 'engine'?"),
        ("kv_cache.max_model_len=5", "kv_cache.max_model_len: unknown key; did you mean 'engine.max_model_len'?"),
        ("zzz=5", "zzz: unknown key"),
        (
            "engine=5",
            "engine: this is a section; write its keys, engine.tensor_parallel_size = ... and so on, not 5",
        ),
        ("seed.x=5", "seed: input should be a valid integer, not {'x': 5}"),
        ("seed=-1", "seed: input should be greater than or equal to 0, not -1"),
        ("model.name=5", "model.name: input should be a valid string, not 5"),
        ("workload.users=true", "workload.users: input should be a valid integer, not True"),
        ("workload.users=2.0", "workload.users: input should be a valid integer, not 2.0"),
        ('engine.max_model_len="64"', "engine.max_model_len: input should be a valid integer, not '64'"),
        ("kv_cache.watermark=nan", "kv_cache.watermark: input should be less than 1, not nan"),
        ("results.steps=1", "results.steps: input should be a valid boolean, not 1"),
        ("results.interval_s=inf", "results.interval_s: input should be less than or equal to 1000000000, not inf"),
        ("memory.oom=die", "memory.oom: input should be 'stop', 'reject' or 'preempt', not 'die'"),
        ("seed", "--set seed: write it as section.key=value"),
        ("=5", "--set =5: write it as section.key=value"),
    ],
)
def test_a_bad_key_or_value_is_named_with_its_path(setting: str, said: str) -> None:
    assert complaint(setting) == said


@pytest.mark.parametrize("value", ["3", "'x'", "[1]", "true"])
@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in known_keys() if "." in key}))
def test_a_section_that_is_a_value_says_what_stands_in_it(section: str, value: str, tmp_path: Path) -> None:
    first = next(key for key in known_keys() if key.startswith(f"{section}."))
    said = f"{section}: this is a section; write its keys, {first} = ... and so on, not "
    with pytest.raises(ScenarioError, match=re.escape(said)):
        Scenario.load(overrides=[f"{section}={value}"])
    path = tmp_path / "scenario.toml"
    path.write_text(f"{section} = {value}\n")
    with pytest.raises(ScenarioError, match=re.escape(said)):
        Scenario.load(path)


@pytest.mark.parametrize("value", ["3", "'x'", "[1]", "true", "{a=1}", "[{a=1}]", "-1.5"])
def test_no_message_names_a_class_of_ours(value: str) -> None:
    """Whatever a key is set to: users know sections and keys, and no records of Python."""
    told = []
    for key in (*known_keys(), *dict.fromkeys(key.partition(".")[0] for key in known_keys())):
        try:
            Scenario.load(overrides=[f"{key}={value}"])
        except ScenarioError as error:
            told.append((key, str(error)))
    assert len(told) > 40
    assert [error for key, error in told if not error.startswith(key)] == []
    assert [error for _, error in told if re.search(r"Section|dictionary|instance|pydantic|dict\b", error)] == []


def test_every_bad_key_is_told_at_once() -> None:
    assert complaint("seed=-1", "workload.num_prompts=0").splitlines() == [
        "seed: input should be greater than or equal to 0, not -1",
        "workload.num_prompts: input should be greater than or equal to 1, not 0",
    ]


def test_a_key_below_a_value_is_refused() -> None:
    assert complaint("workload.prompt_tokens=5", "workload.prompt_tokens.mean=3") == (
        "workload.prompt_tokens.mean: 'prompt_tokens' is a value, not a section"
    )


def test_an_unknown_preset_names_the_nearest() -> None:
    assert complaint(preset="cachng") == (
        "kv_cache.preset: no preset is called 'cachng' (there are caching, pooled, doubling, paged); "
        "did you mean 'caching'?"
    )
    assert preset_keys("paged")["memory.oom"] == "preempt"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    gone, broken, latin = tmp_path / "gone.toml", tmp_path / "broken.toml", tmp_path / "latin.toml"
    broken.write_text("[engine\n")
    latin.write_bytes(b"# caf\xe9\n")
    assert complaint(path=gone) == f"{gone}: no such file; `hbmtwin init {gone}` writes one"
    assert complaint(path=broken).startswith(f"{broken}: not valid TOML: ")
    assert complaint(path=latin).startswith(f"{latin}: cannot be read: ")


def test_an_unknown_section_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[kvcache]\nblock_size = 16\n")
    assert complaint(path=path) == "kvcache: unknown key; did you mean 'kv_cache'?"


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("512MiB", 2**29),
        ("29.5GiB", 31675383808),
        (" 1 kb ", 1000),
        ("2TB", 2 * 10**12),
        ("7", 7),
        ("0.3GB", 3 * 10**8),
    ],
)
def test_bytes_take_units(text: str, bytes_: int) -> None:
    assert parse_bytes(text) == bytes_
    assert Scenario.load(overrides=[f'device.memory_bytes="{text}"']).device.memory_bytes == bytes_


def test_bytes_may_be_written_with_an_exponent_but_not_in_parts() -> None:
    assert Scenario.load(overrides=["device.memory_bytes=3e10"]).device.memory_bytes == 30_000_000_000
    assert complaint("device.memory_bytes=0.5") == "device.memory_bytes: input should be a valid integer, not 0.5"
    assert complaint("device.memory_bytes=12XB") == (
        "device.memory_bytes: write bytes as a number, or with a unit such as 512MiB or 29.5GiB, not '12XB'"
    )


# -- a saved scenario is the same run ----------------------------------------------------------------------------------


def saved(scenario: Scenario, path: Path) -> Scenario:
    path.write_text(scenario.to_toml(), encoding="utf-8")
    return Scenario.load(path)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["kv_cache.tensors=merged", "memory.fit=first", "kv_cache.block_size=16"],
        ["memory.oom=stop", "workload.prompt_tokens={distribution='uniform',low=1,high=9}", "session.think_time_s=2"],
        ["workload.request_rate=inf", "results.steps=true", "kv_cache.options.num_blocks=9", "seed=7"],
    ],
)
def test_a_saved_scenario_reads_back_as_itself(preset: str, changes: list[str], tmp_path: Path) -> None:
    scenario = Scenario.load(preset=preset, overrides=changes)
    again = saved(scenario, tmp_path / "scenario.toml")
    assert again == scenario
    assert again.to_toml() == scenario.to_toml()


def test_the_default_records_and_a_policy_without_preset_read_back(tmp_path: Path) -> None:
    for scenario in (Scenario(), Scenario.load(overrides=["kv_cache.policy=contiguous"])):
        assert saved(scenario, tmp_path / "scenario.toml") == scenario


def test_the_scenario_of_a_result_makes_the_same_run(tmp_path: Path) -> None:
    """A preset changed by --set: read back, the preset must not undo the change."""
    scenario = Scenario.load(
        preset="caching", overrides=["kv_cache.tensors=merged", "workload.num_prompts=3", "workload.output_tokens=5"]
    )
    again = saved(scenario, tmp_path / "scenario.toml")
    first, second = Twin(scenario).run(), Twin(again).run()
    assert first.summary == second.summary
    assert first.checkpoints.equals(second.checkpoints)
    per_layer = Scenario.load(preset="caching", overrides=["workload.num_prompts=3", "workload.output_tokens=5"])
    assert Twin(per_layer).run().summary != first.summary


def test_a_trace_in_a_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "scenario.toml"
    path.write_text('[workload]\ntrace = "../day.csv"\n')
    assert Scenario.load(path).workload.trace == str(tmp_path / "sub" / ".." / "day.csv")
    monkeypatch.chdir(tmp_path)
    assert Scenario.load(Path("sub/scenario.toml")).workload.trace == "sub/../day.csv"
    assert Scenario.load(path, overrides=["workload.trace=here.csv"]).workload.trace == "here.csv"
    assert Scenario.load(path, overrides=["workload.trace=/data/a.csv"]).workload.trace == "/data/a.csv"


def test_a_saved_scenario_names_its_trace_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = Scenario.load(overrides=["workload.trace=day.csv"])
    assert tomllib.loads(scenario.to_toml())["workload"]["trace"] == str(tmp_path / "day.csv")


# -- the list of keys --------------------------------------------------------------------------------------------------


def test_known_keys_are_those_of_the_design() -> None:
    keys = known_keys()
    design = """
        model.name device.name kv_cache.preset kv_cache.policy kv_cache.growth kv_cache.tensors kv_cache.copy_scope
        kv_cache.block_size kv_cache.retention memory.general memory.kv_arena memory.activations memory.oom
        memory.admission workload.trace workload.users workload.request_rate workload.burstiness workload.num_prompts
        workload.time_scale session.between_turns session.think_time_s session.turns results.steps
        results.memory_trace results.checkpoint_s
    """
    assert set(design.split()) <= set(keys)
    assert len(keys) == len(set(keys))
    assert keys[:3] == ["schema_version", "seed", "model.name"]
    sections = "model, device, engine, scheduler, memory, kv_cache, workload, session, slo, results, calibration"
    assert ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys if "." in key)) == sections
    assert set(keys) >= {key for preset in PRESETS.values() for key in preset}


def test_every_key_says_what_it_is() -> None:
    for name, info in Scenario.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            for key, inner in info.annotation.model_fields.items():
                assert inner.description, f"{name}.{key}"
        else:
            assert info.description, name


@pytest.mark.parametrize("key", ["seed", "kv_cache.block_size", "scheduler.max_num_batched_tokens", "slo.ttft_s"])
@pytest.mark.parametrize("number", ["9" * 78, "9" * 5000, "0x" + "F" * 5000, "-" + "9" * 400])
def test_a_number_without_an_end_is_told_by_its_key(key: str, number: str, tmp_path: Path) -> None:
    assert complaint(f"{key}={number}").endswith(
        f"{key}: a whole number of more than 77 digits counts nothing; write a smaller one"
    )
    path = tmp_path / "long.toml"
    path.write_text(
        "\n".join(f"[{section}]" for section in key.split(".")[:-1]) + f"\n{key.split('.')[-1]} = {number}\n"
    )
    said = complaint(path=path)
    assert said.startswith((f"{key}: a whole number", f"{path}: a whole number"))


def test_in_a_table_too() -> None:
    assert complaint(f"workload.output_len={{ a = [{'9' * 100}] }}").startswith("workload.output_len: a whole number")
