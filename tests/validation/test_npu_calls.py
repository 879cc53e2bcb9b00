"""Every call of the NPU kernels beside the real torch_npu over the emulated driver: names, types, shapes, limits."""

from collections import Counter

import pytest

from hbmtwin.validation.emulated import EmulatorUnavailable
from hbmtwin.validation.npu_calls import PLANTED, NpuCallsReport, check_npu_calls

FIA = "npu_fused_infer_attention_score"


@pytest.fixture(scope="module")
def report() -> NpuCallsReport:
    try:
        return check_npu_calls(sorted(PLANTED))
    except EmulatorUnavailable as missing:
        pytest.skip(str(missing))


def test_every_call_is_one_that_torch_npu_has_and_gives_the_shape_that_ours_counts_on(report: NpuCallsReport) -> None:
    assert [call for call in report.calls if call.problems] == []


def test_the_calls_are_of_every_op_that_a_choice_can_name(report: NpuCallsReport) -> None:
    made = Counter((call.op, call.meta) for call in report.calls)
    assert made == {
        (FIA, True): 174,
        (f"{FIA}_v2", True): 71,
        ("npu_fusion_attention", True): 10,
        ("npu_prompt_flash_attention", True): 112,
        ("npu_incre_flash_attention", True): 16,
        ("npu_scatter_pa_kv_cache", True): 6,
        ("npu_dynamic_quant", True): 2,
        ("_npu_paged_attention", False): 4,
        ("_npu_reshape_and_cache", False): 2,
    }


def test_our_tables_of_argument_names_are_the_schemas(report: NpuCallsReport) -> None:
    assert report.names == ()


def test_the_methods_of_the_contract_give_tokens_heads_and_value_size(report: NpuCallsReport) -> None:
    assert report.outputs == ()


def test_kernels_for_npu_are_those_of_the_device_at_hand(report: NpuCallsReport) -> None:
    assert report.at_hand == "npu-flash a2"


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("misspelt", "schema: no argument scale_value"),
        ("plain-lens", "validator: actual_seq_lengths: "),
        ("summed-context", "validator: actual_seq_lengths_kv: "),
        ("wrong-layout", "meta: shape (32, 53, 128), and ours counts on (53, 32, 128)"),
        ("tensor-lens", "schema: actual_seq_lengths is a Tensor, not Optional[List[int]]"),
    ],
)
def test_a_planted_mistake_is_caught(planted: str, said: str, report: NpuCallsReport) -> None:
    caught = [call for call in report.planted[planted] if call.problems]
    assert any(problem.startswith(said) for call in caught for problem in call.problems)
    assert len(caught) >= 50
