"""Any text comes back, files round trip, and mistakes are named."""

import json
import pickle
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.models.tokenizer import Tokenizer


TEXTS = [
    "def f(x):\n    return x + 1\n",
    "the cat sat on the mat, the dog sat on the log\n",
    "naïve façade — 你好, мир 🙂\n",
] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, vocab_size=300, special_tokens=("<|endoftext|>",))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text):
    tokenizer = _trained()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["", "\x00", "<|endoftext|>", " \r\n\t", "e\u0301🙂"])
def test_awkward_texts_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids


def test_control_tokens_in_text_where_they_are_wanted(tokenizer):
    text = "cat<|endoftext|>"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True, control_tokens=True)
    assert ids == [0, *tokenizer.encode("cat"), 0, 0]
    assert 0 not in tokenizer.encode(text)  # nor from then on
    assert tokenizer.control_tokens == {"<|endoftext|>": 0}
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(text, control_tokens=True)[-1] == 0


def test_special_tokens_have_the_names_of_templates():
    settings = {
        "bos_token": {"content": "<s>"},
        "image_token": "<img>",
        "add_bos_token": True,
        "unk_token": None,
    }
    trained = Tokenizer.train(TEXTS, 270, special_tokens=("<s>", "</s>"))
    tokenizer = Tokenizer(
        trained._backend, bos_token="<s>", eos_token="</s>", settings=settings
    )
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<img>",
    }


def test_merges_shorten_the_text(tokenizer):
    text = "the cat sat on the mat"
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_training_is_deterministic():
    # Equal counts leave the order of merges open; it must not follow a hash seed.
    texts = [f"{a}{b} " for a in "abcdefgh" for b in "ijklmnop"]
    first = Tokenizer.train(texts, vocab_size=290)
    second = Tokenizer.train(iter(texts), vocab_size=290)
    assert first._backend.to_str() == second._backend.to_str()


def test_vocabulary_and_control_ids():
    special = ("<s>", "</s>", "<pad>")
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270, special_tokens=special)
    assert tokenizer.vocab_size == 270
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    ids = tokenizer.encode("cat", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "<s>cat</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat"


@pytest.mark.parametrize(
    ("end", "said", "template", "adds"),
    [
        ("</s>", None, None, True),
        ("<s>", None, None, False),  # as GPT-2's
        ("</s>", None, "<s> $A", True),
        ("<s>", None, "<s> $A", True),
        ("</s>", None, "$A </s>", False),  # a file that adds no beginning
        ("</s>", False, "<s> $A", False),
        ("<s>", True, None, True),
    ],
)
def test_the_files_say_whether_texts_have_a_beginning(
    end, said, template, adds, tmp_path
):
    special = ("<s>", "</s>")
    backend = Tokenizer.train(TEXTS, 270, special_tokens=special)._backend
    if template is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    settings = {} if said is None else {"add_bos_token": said}
    made = Tokenizer(backend, bos_token="<s>", eos_token=end, settings=settings)
    assert made.adds_bos == adds
    made.save(tmp_path)
    assert Tokenizer.from_file(tmp_path).adds_bos == adds
    assert not Tokenizer(backend, eos_token=end, settings=settings).adds_bos


def test_batch_equals_one_by_one(tokenizer):
    batch = tokenizer.encode_batch(TEXTS, add_eos=True)
    assert batch == [tokenizer.encode(text, add_eos=True) for text in TEXTS]


def test_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        again = Tokenizer.from_file(path)
        assert repr(again) == repr(tokenizer)
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_what_other_libraries_read_is_kept(tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    Tokenizer.train(TEXTS, vocab_size=270, special_tokens=names).save(source)
    # As transformers writes them; older directories name some tokens in another file.
    said = {
        "tokenizer_class": "BertTokenizer",
        "cls_token": "[CLS]",
        "sep_token": {"content": "[SEP]", "lstrip": False},
        "model_max_length": 512,
        "do_lower_case": True,
    }
    others = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    (source / "special_tokens_map.json").write_text(json.dumps(others))
    template = "{% for m in messages %}{{ m.content }} ü{% endfor %}"
    (source / "chat_template.jinja").write_text(template, "utf-8")

    tokenizer = pickle.loads(pickle.dumps(Tokenizer.from_file(source)))
    assert tokenizer.chat_template == template
    for _ in range(2):  # and the copy of a copy
        tokenizer.save(saved)
        assert json.loads((saved / "tokenizer_config.json").read_text()) == (
            said | others
        )
        assert (saved / "chat_template.jinja").read_text("utf-8") == template
        tokenizer = Tokenizer.from_file(saved)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (2, 3, 4)

    named = [{"name": "default", "template": template}]
    config = said | {"chat_template": named}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "chat_template.jinja").unlink()
    Tokenizer.from_file(source).save(saved)
    assert Tokenizer.from_file(saved).chat_template == named


@pytest.mark.parametrize("saved", ["[]", '{"eos_token": 3}', '{"pad_token": ["a"]}'])
def test_a_configuration_of_another_form_is_refused(tokenizer, tmp_path, saved):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(saved)
    with pytest.raises(ValueError, match="tokenizer_config"):
        Tokenizer.from_file(tmp_path)


def test_pickled_tokenizer_is_the_same(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "the <|endoftext|> cat"
    assert again.encode(text) == tokenizer.encode(text)
    assert repr(again) == repr(tokenizer)


def test_template_of_the_file_adds_nothing(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(tmp_path)
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_control_tokens_of_the_configuration(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "the"}, "bos_token": None}))
    again = Tokenizer.from_file(tmp_path)
    assert again.eos_id == tokenizer.token_id("the")
    assert again.bos_id is None
    with pytest.raises(ValueError, match="add_bos: the tokenizer has no bos token"):
        again.encode("cat", add_bos=True)
    config.write_text(json.dumps({"eos_token": "<missing>"}))
    with pytest.raises(ValueError, match=r"token '<missing>' is not in the vocab"):
        Tokenizer.from_file(tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_file(tmp_path)


def test_control_tokens_found_by_their_usual_names(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    again = Tokenizer.from_file(tmp_path)
    assert (again.bos_id, again.eos_id, again.pad_id) == (0, 0, None)


def test_unigrams_of_deberta():
    """A tokenizer that transformers saved, and its ids."""
    directory = Path(__file__).parents[1] / "fixtures" / "deberta_tokenizer"
    again = Tokenizer.from_file(directory)
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 2, 0)
    for case in json.loads((directory / "expected.json").read_text()):
        ids = again.encode(case["text"], add_bos=True, add_eos=True)
        assert ids == case["ids"]
        assert again.decode(ids) == case["decoded"]


def test_files_of_other_formats(tmp_path):
    (tmp_path / "spm.model").write_bytes(b"")
    message = r"spm\.model beside it is in another format, that of SentencePiece; conv"
    with pytest.raises(FileNotFoundError, match=message):
        Tokenizer.from_file(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        Tokenizer.from_file(tmp_path / "absent.json")


@pytest.mark.parametrize("content", ["", "not json", "{}", '{"model": 3}'])
def test_not_a_tokenizer_file(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not (a tok|valid)"):
        Tokenizer.from_file(file)


def test_saving_into_a_file(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="must be a directory"):
        tokenizer.save(tmp_path / "tokenizer.json")


def test_bad_training_arguments():
    with pytest.raises(ValueError, match=r"vocab_size 257 is too small.* least 258"):
        Tokenizer.train(TEXTS, vocab_size=257, special_tokens=("<s>", "</s>"))
    with pytest.raises(ValueError, match="repeat a token"):
        Tokenizer.train(TEXTS, vocab_size=300, special_tokens=("<s>", "<s>"))


def test_one_string_is_not_a_corpus(no_shape_hook):
    with pytest.raises(TypeError, match="got one string"):
        Tokenizer.train("the cat", vocab_size=300)


@pytest.mark.parametrize("kind", ["SentencePiece", "WordPiece"])
def test_a_continuation_keeps_its_space(kind):
    words = ["the", "cat", "sat", "mat"]
    if kind == "SentencePiece":
        mark, model = "\u2581", tokenizers.models.WordLevel
        vocab = {"<unk>": 0} | {mark + word: i for i, word in enumerate(words, 1)}
        backend = tokenizers.Tokenizer(model(vocab, unk_token="<unk>"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        backend.decoder = tokenizers.decoders.Metaspace()
    else:
        model = tokenizers.models.WordPiece
        vocab = {word: i for i, word in enumerate(["[UNK]", *words, "##s"])}
        backend = tokenizers.Tokenizer(model(vocab))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        backend.decoder = tokenizers.decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    prompt, new = tokenizer.encode("the cat"), tokenizer.encode("sat mat")
    assert tokenizer.decode(new) == "sat mat"  # what was lost
    assert tokenizer.continuation(prompt, new) == " sat mat"
    assert tokenizer.continuation([], new) == "sat mat"
    assert tokenizer.continuation(prompt, []) == ""
    if kind == "WordPiece":
        assert tokenizer.continuation(prompt, [5]) == "s"


def test_a_continuation_of_half_a_character(tokenizer):
    ids = tokenizer.encode("a🙂")
    assert tokenizer.continuation(ids[:-1], ids[-1:]) == "🙂"
    end = tokenizer.eos_id
    assert tokenizer.continuation([end], [*ids, end]) == "a🙂"
    assert (
        tokenizer.continuation([end], [*ids, end], skip_special_tokens=False)
        == "a🙂<|endoftext|>"
    )


def test_a_text_without_spaces_is_learned_in_time(tokenizer):
    # A word of 300,000 letters once took the square of that; the test's limit is hit.
    import random

    letters = "".join(random.Random(0).choices("abcdefgh", k=300_000))
    learned = Tokenizer.train([letters, " " * 100_000], vocab_size=300)
    assert learned.vocab_size == 300
    assert learned.decode(learned.encode(letters[:999])) == letters[:999]
    # Runs that are cut do not move the words around them.
    text = TEXTS[1] * 5
    cut = Tokenizer.train([text + "x" * 600 + "\n" + text], vocab_size=300)
    whole = Tokenizer.train([text, "x" * 512, "x" * 88 + "\n", text], vocab_size=300)
    assert cut._backend.to_str() == whole._backend.to_str()


def test_unknown_token_and_ids_past_the_vocabulary(tokenizer):
    with pytest.raises(ValueError, match=r"'<pad>' is not .*\['<\|endoftext\|>'\]"):
        tokenizer.token_id("<pad>")
    # Rows that a table is padded with have no text.
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode([*ids, 300, 2**40]) == "the cat"
    assert tokenizer.continuation(ids, [*tokenizer.encode(" sat"), 300]) == " sat"
    with pytest.raises(ValueError, match="ids contain -100, expected token ids from 0"):
        tokenizer.decode([1, -100])


def _token(content, number):
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, "id": number} | dict.fromkeys(flags, False)


UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["ab", -1.0]]}


@pytest.mark.parametrize(
    ("vocab", "added", "message"),
    [
        ({"zz": 2**31}, [], "gives 'zz' the id 2147483648, expected an integer from 0"),
        ({"zz": 2**24}, [], "gives 'zz' the id 16777216, .* from 0 to 16777215"),
        ({"zz": -1}, [], "gives 'zz' the id -1"),
        ({"zz": "7"}, [], "gives 'zz' the id '7'"),
        ({"zz": True}, [], "gives 'zz' the id True"),
        ({"zz": 5}, [], "gives '.*' and 'zz' the same id 5"),
        ({}, [_token("zz", 2**32 - 1)], "gives 'zz' the id 4294967295"),
        ({}, [_token("a", 300), _token("b", 300)], "gives 'a' and 'b' the same id 300"),
        (
            {},
            [_token("x" * 70_000, 300)],
            "of 70000 characters, expected at most 65536",
        ),
        ({"x" * 70_000: 300}, [], "of 70000 characters, expected at most 65536"),
    ],
)
def test_ids_that_would_end_the_process(tokenizer, tmp_path, vocab, added, message):
    values = json.loads(tokenizer.to_json())
    values["model"]["vocab"] |= vocab
    values["added_tokens"] += added
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_file(tmp_path)


def test_pieces_of_unigram_are_checked_too(tmp_path):
    plain = {"version": "1.0", "added_tokens": [], "model": UNIGRAM}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(plain))
    assert Tokenizer.from_file(file).vocab_size == 2
    pieces = [*UNIGRAM["vocab"], ["y" * 70_000, -2.0]]
    file.write_text(json.dumps(plain | {"model": UNIGRAM | {"vocab": pieces}}))
    with pytest.raises(ValueError, match="of 70000 characters"):
        Tokenizer.from_file(file)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[infer\]' in a clone"):
        Tokenizer.train(TEXTS, vocab_size=300)


_CACHE = []


def _trained():
    if not _CACHE:
        _CACHE.append(Tokenizer.train(TEXTS, vocab_size=300))
    return _CACHE[0]
