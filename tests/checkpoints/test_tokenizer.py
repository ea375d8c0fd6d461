"""Token ids against llama.cpp and transformers, chat templates against transformers, and odd inputs.

The ids in tests/data/pages/llama_cpp_ids.json come from llama.cpp's own tokenizer, run on the published
GGUF files: for SmolLM2 that is the second opinion (transformers' GGUF conversion loses the splitting of
digits), for Qwen it is one of two.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sv_jax.checkpoints import default_cache_directory, resolve, wheels
from sv_jax.checkpoints.gguf_file import GgufFile
from sv_jax.checkpoints.hf_config import model_config
from sv_jax.checkpoints.registry import REGISTRY
from sv_jax.checkpoints.tokenizer import Tokenizer
from sv_jax.config import UserError
from tests.checkpoints import tiny, tiny_gguf

DATA = Path(__file__).parent.parent / "data"
PAGES = ("code.txt", "prose.txt", "cjk.txt", "emoji.txt")
CHAT = "<|im_start|>user\nHello 42!<|im_end|>\n<|im_start|>assistant\n"
QWEN = "qwen2.5-coder-0.5b"


def _page(name: str) -> str:
    return (DATA / "pages" / name).read_bytes().decode("utf-8")  # bytes: keep line ends as they are


def _llama_cpp_ids(model: str) -> dict[str, list[int]]:
    return json.loads((DATA / "pages" / "llama_cpp_ids.json").read_text())[model]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny converted checkpoint; tests that change its files copy it."""
    root = tmp_path_factory.mktemp("tokenizer")
    config = model_config(tiny.config_dict("llama", vocab_size=len(tiny_gguf.vocabulary())))
    path = tiny_gguf.write(root / "tiny.gguf", config, tiny.tensors(config))
    return resolve(str(path), cache_directory=root, progress=False).directory


def _with(tmp_path: Path, directory: Path, config: dict, template: str | None = None) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


@pytest.mark.real
@pytest.mark.parametrize("page", [*PAGES, "chat"])
def test_smollm2_ids_are_those_of_llama_cpp(page):
    tokenizer = resolve("smollm2-135m", progress=False).tokenizer()
    text = CHAT if page == "chat" else _page(page)
    assert tokenizer.encode(text) == _llama_cpp_ids("smollm2-135m")[page]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def qwen():
    """The Qwen checkpoint if an earlier run fetched it: half a gigabyte is too much for every run."""
    if not wheels.gguf_path(QWEN, REGISTRY[QWEN], default_cache_directory()).exists():
        pytest.skip(f"{QWEN} is not in the cache")
    return resolve(QWEN, progress=False)


@pytest.mark.real
@pytest.mark.parametrize("page", [*PAGES, "chat"])
def test_qwen_ids_are_those_of_llama_cpp(qwen, page):
    tokenizer = qwen.tokenizer()
    text = CHAT if page == "chat" else _page(page)
    assert tokenizer.encode(text) == _llama_cpp_ids(QWEN)[page]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.real
@pytest.mark.parity
def test_qwen_ids_are_those_of_transformers(qwen):
    """Qwen2Tokenizer, given the vocabulary and merges of the GGUF file, brings its own splitting."""
    transformers = pytest.importorskip("transformers")
    path = wheels.gguf_path(QWEN, REGISTRY[QWEN], default_cache_directory())
    metadata = GgufFile(path).metadata
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs, ours = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges), qwen.tokenizer()
    for page in PAGES:
        assert ours.encode(_page(page)) == theirs.encode(_page(page)), page
    # Decomposed accents: Qwen's tokenizer composes them first, llama.cpp does not.
    assert ours.encode("cafe\u0301") == theirs.encode("cafe\u0301") == ours.encode("caf\u00e9")


@pytest.mark.real
def test_the_second_start_is_quick():
    resolve("smollm2-135m", progress=False)
    start = time.process_time()
    checkpoint = resolve("smollm2-135m", progress=False)
    checkpoint.tokenizer()
    assert time.process_time() - start < 1.5  # no hash, no dequantisation: about 0.2 s
    assert checkpoint.provenance == "smollm2-135m, dequantised from the published GGUF (sha256 b179…)"
    assert checkpoint.eos_token_ids[0] == 2 and checkpoint.config.tie_word_embeddings


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'What is 2 < 3 & "x"?'}],
    [
        {"role": "user", "content": "  spaces kept?\n"},
        {"role": "assistant", "content": "Yes: <b>kept</b> – 日本語 🎌"},
        {"role": "user", "content": ""},
    ],
]
TOOL_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}
TOOLS = [
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "two"},
    ]
]
# What real templates use, in one: whitespace control, loop controls, namespaces, tojson, generation, helpers.
FEATURES = """
{%- set ns = namespace(n=0) %}
{% for message in messages %}
    {%- if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
{{ bos_token }}{{ message.role | upper }}: {% generation %}{{ message | tojson }}{{ ns.n }}{% endgeneration %}

    {% if message.role == 'stop' %}{% break %}{% endif %}
{% endfor %}
{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{{ {'b': 1, 'a': [1, 2]} | tojson(indent=2) }} {{ strftime_now('%Y') }} {{ missing }}
{% if add_generation_prompt %}{{ eos_token }}{% endif %}
"""
ODD = [[{"role": r, "content": "<&'é"} for r in ("user", "skip", "assistant", "stop", "user")]]


@pytest.mark.parity
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "features"])
def test_chat_templates_render_like_transformers(directory, tmp_path, name, prompt):
    transformers = pytest.importorskip("transformers")
    template = FEATURES if name == "features" else (DATA / "templates" / f"{name}.jinja").read_text()
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    path = _with(tmp_path, directory, config, template)
    ours = Tokenizer(path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **config)
    extra = {"smollm2": [], "qwen2.5": TOOLS, "features": ODD}[name]
    for messages in CONVERSATIONS + extra:
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A{{ messages[0].content }}", "Ahi"),
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "tool_use", "template": "T"}], None),
        (None, None),
    ],
)
def test_where_the_template_comes_from(directory, tmp_path, source, expected):
    tokenizer = Tokenizer(_with(tmp_path, directory, {"chat_template": source}))
    assert tokenizer.has_chat_template == (expected is not None)
    if expected is None:
        with pytest.raises(UserError, match="has no chat template"):
            tokenizer.apply_chat_template([])
    else:
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == expected
    # A file of its own wins, as in transformers.
    assert (
        Tokenizer(_with(tmp_path, directory, {"chat_template": source}, "J")).apply_chat_template([]) == "J"
    )


def test_a_template_that_refuses(directory, tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="the chat template refuses these messages: roles must alternate"):
        Tokenizer(_with(tmp_path, directory, {}, template)).apply_chat_template([])


def test_a_broken_template(directory, tmp_path):
    with pytest.raises(UserError, match="is not valid Jinja"):
        Tokenizer(_with(tmp_path, directory, {}, "{% if %}"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(directory, tmp_path, template):
    with pytest.raises(UserError, match="the chat template refuses these messages"):
        Tokenizer(_with(tmp_path, directory, {}, template)).apply_chat_template([])


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False])
def test_bos_and_eos_are_added_as_the_gguf_says(tmp_path, add_bos, add_eos):
    config = model_config(tiny.config_dict("llama", vocab_size=len(tiny_gguf.vocabulary())))
    metadata: dict = {"tokenizer.ggml.add_eos_token": add_eos}
    if add_bos is not None:
        metadata["tokenizer.ggml.add_bos_token"] = add_bos
    path = tiny_gguf.write(tmp_path / "m.gguf", config, tiny.tensors(config), metadata=metadata)
    tokenizer = resolve(str(path), cache_directory=tmp_path, progress=False).tokenizer()
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1] * bool(add_bos) + plain + [2] * add_eos
    assert tokenizer.encode("") == [1] * bool(add_bos) + [2] * add_eos


def test_tokens_that_only_the_config_declares(directory, tmp_path):
    declared = {
        "264": {"content": "<think>", "special": False},
        "0": {"content": "<|endoftext|>", "special": True},
    }
    tokenizer = Tokenizer(_with(tmp_path, directory, {"added_tokens_decoder": declared}))
    assert tokenizer.encode("hello<think>")[1:] == [264]
    assert tokenizer.decode([264]) == "<think>"


def test_odd_inputs(directory):
    tokenizer = Tokenizer(directory, eos_token_ids=(2,))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.decode([10**9, -1, tokenizer.vocab_size]) == ""
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"
    with pytest.raises(UserError, match="it is not valid Unicode"):
        tokenizer.encode("\ud800")


def test_half_a_character_decodes_to_replacement(directory):
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode("é")
    assert len(ids) == 2 and tokenizer.decode(ids[:1]) == "\ufffd" and tokenizer.decode(ids) == "é"


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"lacks tokenizer\.json; allowed: a fast tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer that this version of tokenizers reads"):
        Tokenizer(tmp_path)
