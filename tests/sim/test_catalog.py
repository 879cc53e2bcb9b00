"""The catalog: every number has a source, every config is read or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.weights import weight_bytes
from hbmtwin.sim.catalog import CatalogError, hugging_face_ids, model, model_name, models
from hbmtwin.sim.sections import ModelSection

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}


def config(folder: Path, text: str | bytes | None = None, **changes: Any) -> str:
    path = folder / "some-model" / "config.json"
    path.parent.mkdir()
    if text is None:
        text = json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"})
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_ids() -> None:
    assert len(models()) == 59
    assert {"llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "bamba-9b"} <= set(models())


@pytest.mark.parametrize("name", models())
def test_every_model_has_a_source(name: str) -> None:
    assert model(name).source.startswith("config.json of ")
    assert "/" in model(name).source


def test_known_figures() -> None:
    llama = model("llama-3.1-8b")
    assert (llama.num_layers, llama.num_kv_heads, llama.head_dim, llama.max_position_embeddings) == (32, 8, 128, 131072)


def test_unknown_ids_come_with_the_nearest() -> None:
    with pytest.raises(CatalogError, match=r"did you mean 'llama-2-7b'\?.*nothing is downloaded"):
        model("Llama_2-7b-hg")


# -- a model by its repository ---------------------------------------------------------------------------------------


def test_every_model_has_repositories_of_the_shape_that_the_hub_gives_them_and_shares_none() -> None:
    every = [id for name in models() for id in hugging_face_ids(name)]
    assert len({id.lower() for id in every}) == len(every) >= len(models())
    for name in models():
        assert hugging_face_ids(name)
        for id in hugging_face_ids(name):
            assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", id)
        assert any(id in model(name).source for id in hugging_face_ids(name))  # the one that its sizes are from


@pytest.mark.parametrize("name", models())
def test_a_repository_is_its_model_in_any_case(name: str) -> None:
    for id in hugging_face_ids(name):
        for written in (id, id.upper(), id.lower()):
            assert model(written) == model(name)
            assert model_name(written) == name
    assert model_name(name.upper()) == name


def test_a_scenario_has_the_name_of_the_catalog_however_the_model_was_called() -> None:
    assert ModelSection(name="meta-LLAMA/llama-2-7b-HF").name == "llama-2-7b"
    assert ModelSection(name="mistralai/Mistral-7B-Instruct-v0.1").name == "mistral-7b-v0.1"
    assert ModelSection(name="a-mirror/Gemma-2-9B").name == "gemma-2-9b"
    assert ModelSection(name="deepseek-ai/DeepSeek-R1-Distill-Llama-8B").name == "llama-3.1-8b"
    assert ModelSection(name="meta-llama/Llama-2-34b-hf").name == "meta-llama/Llama-2-34b-hf"


def test_a_directory_of_that_name_comes_before_the_repository_as_in_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(config(tmp_path, num_hidden_layers=3)).parent
    (tmp_path / "meta-llama").mkdir()
    folder.rename(tmp_path / "meta-llama" / "Llama-2-7b-hf")
    monkeypatch.chdir(tmp_path)
    assert model("meta-llama/Llama-2-7b-hf").num_layers == 3
    assert ModelSection(name="meta-llama/Llama-2-7b-hf").name == "meta-llama/Llama-2-7b-hf"
    assert model("Meta-Llama/Llama-2-7b-hf").num_layers == 32  # letters count on disk


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("meta-llama/Llama-2-34b-hf", "did you mean 'llama-2-13b' or 'meta-llama/Llama-2-13b-hf'? The"),
        ("meta-lama/Llama-3.1-8B-Instuct", "did you mean 'llama-3.1-8b' or 'meta-llama/Llama-3.1-8B-Instruct'? The"),
        ("mistral_7b", "did you mean 'mistral-7b-v0.1' or 'mistral-7b-v0.3'? The"),
        (
            "Nobody/Nothing-9B-Instruct",
            "unknown model 'Nobody/Nothing-9B-Instruct': The catalog has 59 (`hbmtwin catalog ",
        ),
        ("x" * 300, "x': The catalog has 59 (`hbmtwin catalog models` lists them)"),
        ("a\0b", "'a\\x00b': The catalog has 59 (`hbmtwin catalog models` lists them)"),
    ],
    ids=["a size that is not there", "typing errors", "own", "none", "long", "null"],
)
def test_an_unknown_model_is_told_the_nearest_names_of_both_kinds(name: str, nearest: str) -> None:
    with pytest.raises(CatalogError) as refused:
        model(name)
    assert nearest in str(refused.value)
    assert "give the path of its config.json" in str(refused.value)


def test_a_config_on_disk_equals_the_catalog(tmp_path: Path) -> None:
    path = config(tmp_path)
    read = model(path)
    known = model("llama-3.1-8b")
    assert read.name == "some-model"
    assert read.source == "config.json of some-model"
    for field in ("num_layers", "hidden_size", "intermediate_size", "num_kv_heads", "head_dim", "vocab_size"):
        assert getattr(read, field) == getattr(known, field)
    assert model(str(Path(path).parent)) == read


def test_defaults_of_a_config(tmp_path: Path) -> None:
    read = model(config(tmp_path, num_key_value_heads="absent", torch_dtype="absent", tie_word_embeddings="absent"))
    assert read.num_kv_heads == 32
    assert read.head_dim == 128
    assert read.dtype_bytes == 2
    assert not read.tie_word_embeddings
    assert "no dtype given, counted as 16 bit" in read.source


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    assert model(config(tmp_path, head_dim=256)).head_dim == 256


def test_an_mlp_without_gate_is_known_by_its_model_type(tmp_path: Path) -> None:
    assert not model(config(tmp_path, model_type="gpt_neox")).gated_mlp


def test_float32_counts_as_16_bit_and_the_source_says_so(tmp_path: Path) -> None:
    read = model(config(tmp_path, torch_dtype="float32"))
    assert read.dtype_bytes == 2
    assert read.source == ("config.json of some-model; float32, counted as 16 bit, as vLLM's dtype auto loads it")


def test_a_decoder_is_known_by_its_architecture(tmp_path: Path) -> None:
    assert model(config(tmp_path, architectures=["LlamaForCausalLM"])).num_layers == 32


def test_a_model_that_reads_images_is_refused_as_its_encoders_are_not_counted(tmp_path: Path) -> None:
    llava = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 1024},
    }
    with pytest.raises(CatalogError, match=r"LlavaForConditionalGeneration reads more than text \(text_config\)"):
        model(config(tmp_path, json.dumps(llava)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, r"model_type must be a text, not \['llama'\]"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers is missing"),
        ({"vocab_size": 0}, r"vocab_size must be a whole number from 1 to \d+, not 0"),
        ({"hidden_size": -4096}, "hidden_size must be a whole number"),
        ({"hidden_size": 4096.5}, "hidden_size must be a whole number"),
        ({"hidden_size": "4096"}, "hidden_size is the text '4096'; write the number without quotes"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({"num_key_value_heads": 64}, "num_key_value_heads 64 does not divide num_attention_heads 32"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel writes no text"),
        ({"model_type": "bert"}, "bert writes no text"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel writes no text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification writes no text"),
        ({"mm_vision_tower": "openai/clip-vit-large-patch14"}, r"llama reads more than text \(mm_vision_tower\)"),
        ({"audio_config": {"d_model": 1280}}, r"reads more than text \(audio_config\)"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 4096"),
        ({"hidden_size": 4097}, "head_dim is missing, and hidden_size 4097 is no multiple of 32 heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' comes with a later release"),
        ({"num_local_experts": 8}, r"experts \(num_local_experts\) of the model type llama are not computed; those of"),
        ({"n_routed_experts": 256}, r"experts \(n_routed_experts\) of the model type llama"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim is missing"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank is the text '512'"),
        ({"kv_lora_rank": 0}, r"kv_lora_rank must be a whole number from 1 to \d+, not 0"),
        ({**LATENT, "q_lora_rank": -1}, "q_lora_rank must be a whole number"),
        ({**LATENT, "index_topk": 2048}, r"sparse attention with an index of its own \(index_topk\)"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"sliding_window": "4096"}, r"sliding_window must be a whole number of tokens from 1 to \d+, not '4096'"),
        ({"sliding_window": 0}, "sliding_window must be a whole number of tokens"),
        ({"attention_chunk_size": 8192}, r"chunked local attention \(attention_chunk_size\)"),
        ({"model_type": "jamba"}, "layers of the model type jamba come with a later release"),
        ({"layer_types": ["chunked_attention"] * 32}, "layers of type chunked_attention come with a later release"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window must be a whole number of tokens"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types has 31 entries for 32 num_hidden_layers"),
        ({"sliding_window": 9, "sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number"),
        (
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be a whole number",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        model(config(tmp_path, **changes))
    assert "config.json" in str(refused.value)


def test_latent_attention_is_read_in_the_words_of_deepseek(tmp_path: Path) -> None:
    read = model(config(tmp_path, **LATENT, q_lora_rank=1536, v_head_dim=96, head_dim=64, num_key_value_heads=1))
    assert (read.kv_lora_rank, read.q_lora_rank, read.v_head_dim) == (512, 1536, 96)
    assert (read.qk_nope_head_dim, read.qk_rope_head_dim, read.head_dim) == (128, 64, 192)
    assert (read.latent_dim, read.num_kv_heads) == (576, 32)


def test_defaults_of_latent_attention(tmp_path: Path) -> None:
    read = model(config(tmp_path, **LATENT, q_lora_rank=None))
    assert (read.q_lora_rank, read.v_head_dim, read.latent_cache) == (0, 128, True)
    assert model("llama-2-7b").latent_dim == model("llama-2-7b").v_head_dim == 0


def test_a_latent_that_vllm_does_not_cache_is_told() -> None:
    youtu, minicpm = model("youtu-llm-2b"), model("minicpm3-4b")
    assert (youtu.latent_dim, youtu.latent_cache) == (576, True)
    assert (minicpm.latent_dim, minicpm.latent_cache) == (0, False)
    assert (minicpm.head_dim, minicpm.v_head_dim) == (96, 64)
    assert minicpm.source.endswith("; vLLM caches its K and V, not the latent")


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    assert model(config(tmp_path, sliding_window=131072, use_sliding_window=False)).layer_windows == ()


@pytest.mark.parametrize(
    ("name", "parameters", "windows"),
    [
        ("mistral-7b-v0.1", 7_241_732_096, (4096,) * 32),
        ("gemma-2-9b", 9_241_705_984, (4096, 0) * 21),
        ("gemma-3-1b", 999_885_952, ((512,) * 5 + (0,)) * 4 + (512,) * 2),
        ("command-r7b", 8_028_033_024, (4096, 4096, 4096, 0) * 8),
        ("olmo-3-7b", 7_298_011_136, (4096, 4096, 4096, 0) * 8),
    ],
)
def test_models_with_windows_have_as_many_parameters_as_published(
    name: str, parameters: int, windows: tuple[int, ...]
) -> None:
    read = model(name)
    assert read.layer_windows == windows
    # Norms are two a layer, where models have one (Cohere) to four and norms per head (kernels/weights.py).
    assert weight_bytes(read) / 2 == pytest.approx(parameters, rel=0.0003)
    assert (read.window, read.num_window_layers) == (max(windows), sum(w > 0 for w in windows))


def test_windows_in_the_words_of_a_config(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 16
    assert model(config(tmp_path, layer_types=types, sliding_window=1024)).layer_windows == (1024, 0) * 16


def test_qwen_lets_its_first_layers_see_all(tmp_path: Path) -> None:
    read = model(config(tmp_path, sliding_window=4096, use_sliding_window=True, max_window_layers=28))
    assert read.layer_windows == (0,) * 28 + (4096,) * 4


def test_layer_types_win_over_a_window_that_is_given_besides(tmp_path: Path) -> None:
    assert model(config(tmp_path, layer_types=["full_attention"] * 32, sliding_window=4096)).layer_windows == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "hidden_size": 4096,\n oops\n}', "line 3: no valid JSON"),
        ("", "line 1: no valid JSON"),
        (b"\xff\xfe\x00", "no valid JSON"),
        ("[" * 200_000, "no valid JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "no valid JSON"),
        ("[1, 2]", "must be a JSON object, not list"),
        (" " * (1 << 20) + "{}", "larger than 1 MiB"),
    ],
    ids=["line", "empty", "bytes", "deep", "digits", "list", "large"],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        model(config(tmp_path, text))


def test_missing_files_and_directories_without_one(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such file"):
        model(str(tmp_path / "config.json"))
    with pytest.raises(CatalogError, match="no such file"):
        model(str(tmp_path))
