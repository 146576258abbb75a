"""From emitted tokens to text, stops, log probabilities and times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from sametoken.engine.input_processor import InputProcessor
from sametoken.engine.output_processor import OutputProcessor
from sametoken.engine.user_inputs import PromptTokens
from sametoken.errors import NumericalError, StructuredOutputError
from sametoken.text.tokenizer import Tokenizer
from sametoken.types.outputs import Logprob
from sametoken.types.request import RequestUpdate
from sametoken.types.sampling_params import SamplingParams
from sametoken.types.structured_outputs import MaskFault

PROMPT = (40, 41, 42)
EOS = 0
MAX_LEN = 200
#: A special token of ``byte_fallback``.
SILENT = 63


class Run:
    """One request under an output processor."""

    def __init__(self, tokenizer, *, stream=True, **params):
        inputs = InputProcessor(
            tokenizer,
            vocab_size=len(tokenizer.hf),
            max_model_len=MAX_LEN,
            eos_token_ids=(EOS,),
            num_speculative_tokens=0,
            seed=0,
        )
        self.outputs = OutputProcessor(tokenizer)
        self.now = 10.0
        params = SamplingParams(**{"max_tokens": None, **params})
        self.processed = inputs.process("r", PromptTokens("p", PROMPT), params)
        self.outputs.add(self.processed, self.now, stream=stream)

    def emit(self, *token_ids, request_id="r", **changes):
        """One update; returns what came of it and who is released, with the tokens kept."""
        update = RequestUpdate(request_id, token_ids, max(len(token_ids) - 1, 0), 0, True, 0)
        self.now += 1.0
        done = self.outputs.process([update._replace(**changes)], self.now)
        return (done.outputs[0] if done.outputs else None), done.released


@pytest.fixture
def run(tokenizer):
    return lambda **params: Run(tokenizer, **params)


def completion(output):
    return output.outputs[0]


def test_text_and_tokens_accumulate(run, tokenizer):
    ids = tokenizer.encode("the cat sat on the mat")
    request = run()
    first, released = request.emit(*ids[:2])
    assert completion(first).token_ids == ids[:2]
    assert completion(first).text == tokenizer.decode(ids[:2])
    assert (first.finished, completion(first).finish_reason, released) == (False, None, {})
    second, _ = request.emit(*ids[2:])
    assert completion(second).text == "the cat sat on the mat"
    assert (second.prompt, second.prompt_token_ids) == ("p", PROMPT)


def test_special_tokens_have_spaces_between_them_unless_joined():
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, 50)}}
    backend = Backend(models.WordLevel(words, "<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))

    def text(**params) -> str:
        output, _ = Run(tokenizer, max_tokens=6, **params).emit(1, 50, 51, 51, 2, 50)
        return completion(output).text

    shown = {"skip_special_tokens": False}
    assert text(**shown) == " w1 <s> </s> </s> w2 <s>"
    assert text(**shown, spaces_between_special_tokens=False) == " w1 <s></s></s> w2 <s>"
    assert text() == text(spaces_between_special_tokens=False) == " w1 w2"


def test_eos_ends_the_request_and_drops_the_rest_of_the_window(run, tokenizer):
    ids = tokenizer.encode("the cat")
    output, released = run().emit(*ids, EOS, *ids)
    assert completion(output).token_ids == (*ids, EOS)
    assert completion(output).text == "the cat"
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("stop", None)
    assert released == {"r": len(PROMPT) + len(ids) + 1}
    assert output.finished


def test_a_stop_token_of_the_request_is_its_reason_and_no_text(run, tokenizer):
    (cat,) = tokenizer.encode(" cat")[-1:]
    ids = tokenizer.encode("the mat")
    output, _ = run(stop_token_ids=[cat]).emit(*ids, cat, *ids)
    assert (completion(output).text, completion(output).stop_reason) == ("the mat", cat)
    assert completion(output).token_ids == (*ids, cat)
    included, _ = run(stop_token_ids=[cat], include_stop_str_in_output=True).emit(*ids, cat)
    assert completion(included).text == "the mat" + tokenizer.decode([cat])


def test_ignore_eos_goes_on(run, tokenizer):
    ids = tokenizer.encode("the cat")
    output, _ = run(ignore_eos=True).emit(*ids, EOS, *ids)
    assert completion(output).text == "the catthe cat"
    assert not output.finished


def test_length_ends_the_request_in_mid_window(run, tokenizer):
    ids = tokenizer.encode("the cat sat on the mat")
    output, released = run(max_tokens=3).emit(*ids)
    assert completion(output).token_ids == ids[:3]
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("length", None)
    assert released == {"r": len(PROMPT) + 3}


def test_max_model_len_is_a_length_too(run, tokenizer):
    (a,) = tokenizer.encode("a")
    output, _ = run().emit(*[a] * MAX_LEN)
    assert len(completion(output).token_ids) == MAX_LEN - len(PROMPT)
    assert completion(output).finish_reason == "length"


def test_a_stop_string_is_cut_from_the_text_and_later_tokens_from_everything(run, tokenizer):
    ids = tokenizer.encode("the cat sat on the mat")
    full = [tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    num_tokens = next(i for i, text in enumerate(full) if " sat" in text) + 1
    logprobs = tuple({i: Logprob(-1.0, 1)} for i in ids)
    output, released = run(stop=[" sat"], logprobs=0).emit(*ids, logprobs=logprobs)
    assert completion(output).text == "the cat"
    assert completion(output).token_ids == ids[:num_tokens]
    assert released == {"r": len(PROMPT) + num_tokens}
    assert len(completion(output).logprobs) == num_tokens
    assert completion(output).cumulative_logprob == -num_tokens
    assert (completion(output).finish_reason, completion(output).stop_reason) == ("stop", " sat")
    included, _ = run(stop=[" sat"], include_stop_str_in_output=True).emit(*ids)
    assert completion(included).text == "the cat sat"


def test_a_stop_string_goes_before_a_stop_token_and_before_length(run, tokenizer):
    ids = tokenizer.encode("the cat")
    by_token, _ = run(stop=["cat"], stop_token_ids=[ids[-1]]).emit(*ids)
    assert completion(by_token).stop_reason == "cat"
    by_length, _ = run(stop=["cat"], max_tokens=len(ids)).emit(*ids)
    assert completion(by_length).finish_reason == "stop"
    eos, _ = run(max_tokens=len(ids) + 1).emit(*ids, EOS)
    assert completion(eos).finish_reason == "stop"


def test_a_stop_string_counts_once_min_tokens_lie_before_it(run, tokenizer):
    (a,) = tokenizer.encode("a")
    output, _ = run(stop=["a"], min_tokens=2).emit(a, a, a, a)
    assert completion(output).token_ids == (a, a, a)
    assert completion(output).text == "aa"


@pytest.fixture(scope="module")
def byte_fallback():
    """As Llama 2 and Mistral write: a line break is a byte token."""
    words = ["</s>", "a", "b", "<0x0A>", "<0xC3>", "<0xA9>", "<0xFF>"]
    # Padding up to the ids of the prompt.
    words += [f"w{i}" for i in range(len(words), 64)]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"eos_token": "</s>", "additional_special_tokens": [words[SILENT]]}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **special))


@pytest.mark.parametrize(
    ("stop", "emitted", "text", "num_kept"),
    [
        ("\n", (1, 3, 2), "a", 2),
        ("a\n", (2, 1, 3, 2), "b", 3),
        ("é", (1, 3, 4, 5, 3, 2), "a\n", 4),
        ("\n", (1, 6, 3, 2), "a\ufffd\ufffdb", 4),
        # All of the text, and the longest of several.
        ("bab\n", (2, 1, 2, 3, 1), "", 4),
        (["\n", "a\n", "é"], (2, 1, 3, 2), "b", 3),
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_stop_string_of_byte_tokens_ends_at_the_last_of_them(
    byte_fallback, stop, emitted, text, num_kept, one_by_one
):
    request = Run(byte_fallback, stop=stop, max_tokens=num_kept)
    for window in [(token,) for token in emitted] if one_by_one else [emitted]:
        output, released = request.emit(*window)
        if released:
            break
    found = completion(output)
    assert (found.text, len(found.token_ids)) == (text, num_kept)
    assert found.finish_reason == ("length" if "\ufffd" in text else "stop")


def test_a_stop_string_of_byte_tokens_waits_for_min_tokens(byte_fallback):
    output, _ = Run(byte_fallback, stop=["\n"], min_tokens=1).emit(3, 1, 3)
    assert (completion(output).text, completion(output).token_ids) == ("\na", (3, 1, 3))
    # A token without a text ends none.
    output, _ = Run(byte_fallback, stop=["\n"], min_tokens=1).emit(3, SILENT, 1, 3)
    assert (completion(output).text, completion(output).token_ids) == ("\na", (3, SILENT, 1, 3))


def test_the_space_between_prompt_and_text_belongs_to_the_text():
    """As Llama 2 writes: a text's decoding loses the space that begins it."""
    words = ["</s>", "▁a", *(f"w{i}" for i in range(2, 64))]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    output, _ = Run(tokenizer, logprobs=0).emit(
        1, 1, EOS, logprobs=({1: Logprob(-1.0, 1), EOS: Logprob(-2.0, 2)},) * 3
    )
    assert completion(output).text == " a a"
    assert completion(output).logprobs[0][1].decoded_token == " a"


def test_streamed_text_waits_where_a_stop_may_begin(run, tokenizer):
    request = run(stop=["stop!"])
    texts = [completion(request.emit(i)[0]).text for i in tokenizer.encode("the stop st")]
    assert texts[-1] == "the stop "
    assert all("the stop st".startswith(text) for text in texts)
    last, _ = request.emit(EOS)
    assert completion(last).text == "the stop st"


def test_a_character_cut_short_by_the_end_is_shown(run, tokenizer):
    start = tokenizer.backend.token_to_id("ð")
    request = run()
    assert completion(request.emit(start)[0]).text == ""
    assert completion(request.emit(EOS)[0]).text == "\ufffd"
    (cat,) = tokenizer.encode(" cat")[-1:]
    output, _ = run(stop_token_ids=[cat]).emit(start, cat)
    assert completion(output).text == "\ufffd"


@pytest.mark.parametrize("after", ["a", "<|end|>"])
def test_what_follows_broken_bytes_begins_behind_them(run, tokenizer, after):
    broken = [tokenizer.backend.token_to_id(stand_in) for stand_in in "ðŁ"]
    output, _ = run().emit(*broken, tokenizer.backend.token_to_id(after))
    assert output.outputs[0].starts_from(0) == [0, 0, 1]
    assert output.outputs[0].starts_from(2) == [1]


@settings(max_examples=90)
@given(data=st.data())
def test_windows_do_not_matter_and_nothing_is_taken_back(tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, 330), min_size=1, max_size=20))
    params = {
        "stop": data.draw(st.lists(st.text("theca ", min_size=1, max_size=3), max_size=2)),
        "max_tokens": data.draw(st.integers(3, 20)),
        "min_tokens": data.draw(st.integers(0, 3)),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
    }
    whole, _ = Run(tokenizer, **params).emit(*token_ids)
    request = Run(tokenizer, **params)
    texts = [""]
    left = list(token_ids)
    output = None
    while left and not (output and output.finished):
        size = data.draw(st.integers(1, 4))
        window, left = left[:size], left[size:]
        output, _ = request.emit(*window)
        texts.append(completion(output).text)
    assert completion(output) == completion(whole)
    assert all(later.startswith(text) for text, later in itertools.pairwise(texts))


def test_nan_logits_fail_the_request_alone(run, tokenizer):
    request = run()
    request.emit(*tokenizer.encode("the"))
    output, released = request.emit(failed=True)
    assert completion(output).finish_reason == "error"
    assert isinstance(completion(output).error, NumericalError)
    assert completion(output).text == "the"
    assert list(released) == ["r"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (MaskFault.NO_VALID_TOKEN, "no token satisfies"),
        (MaskFault.SLOW, "took longer than"),
        (MaskFault.BROKEN, "library failed"),
    ],
)
def test_a_request_without_a_valid_token_says_why(run, fault, cause):
    output, _ = run().emit(failed=True, mask_fault=fault)
    assert isinstance(completion(output).error, StructuredOutputError)
    assert cause in completion(output).error.cause
    assert completion(output).error.remedy


def test_updates_of_a_finished_request_are_ignored(run):
    request = run()
    request.emit(EOS)
    assert request.emit(5, 6) == (None, {})
    assert request.outputs.num_unfinished == 0


def test_without_stream_only_the_last_output_comes(run, tokenizer):
    request = run(stream=False)
    assert request.emit(*tokenizer.encode("the")) == (None, {})
    output, _ = request.emit(EOS)
    assert completion(output).text == "the"


def test_times_counters_and_cached_tokens(run, tokenizer):
    request = run()
    request.outputs.begin(["r", "gone"], 10.5)
    request.outputs.begin(["r"], 11.5)
    request.emit(samples=False, num_cached=2)
    output, _ = request.emit(*tokenizer.encode("the"), num_drafts=3, num_accepted=2, num_cached=2)
    assert output.metrics.first_token_time == 12.0
    output, _ = request.emit(EOS, num_drafts=1, num_accepted=0, num_cached=2)
    metrics = output.metrics
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finished_time) == (10, 12, 13)
    assert metrics.first_scheduled_time == 10.5
    assert metrics.num_cached_tokens == 2
    speculation = metrics.speculation
    assert (speculation.num_steps, speculation.num_draft_tokens) == (2, 4)
    assert speculation.accepted_per_position == (1, 1, 0)


def test_the_windows_of_a_completion_are_told_once_it_is_over(run):
    request = run(max_tokens=4)
    request.emit(samples=False)
    request.emit(20)
    going, _ = request.emit(21, 22, num_drafts=3, num_accepted=1)
    assert completion(going).windows == ()
    last, _ = request.emit(23, num_drafts=2, num_accepted=0)
    assert completion(last).windows == ((0, 0), (3, 1), (2, 0))


def test_candidates_get_their_texts_and_the_first_prompt_token_has_none(run, tokenizer):
    cat, the = (tokenizer.encode(text)[0] for text in ("cat", "the"))
    request = run(logprobs=1, prompt_logprobs=0)
    chunk = ({41: Logprob(-2.0, 3)}, {42: Logprob(-3.0, 4)})
    request.emit(samples=False, prompt_logprobs=chunk)
    candidates = {cat: Logprob(-0.5, 2), the: Logprob(-0.25, 1)}
    output, _ = request.emit(cat, logprobs=(candidates,))
    assert completion(output).logprobs[0][the] == Logprob(-0.25, 1, tokenizer.decode([the]))
    assert completion(output).cumulative_logprob == -0.5
    first, second, third = output.prompt_logprobs
    assert first is None
    assert second[41] == Logprob(-2.0, 3, tokenizer.decode([41]))
    assert third[42].rank == 4


@pytest.mark.parametrize("num_scored", [1, 2])
def test_a_request_that_fails_before_its_first_token_tells_no_prompt_candidates(run, num_scored):
    """Of a prompt of three tokens; how many are scored by then depends on chunk borders."""
    request = run(logprobs=None, prompt_logprobs=0)
    request.emit(samples=False, prompt_logprobs=({41: Logprob(-2.0, 3)},) * num_scored)
    output, _ = request.emit(failed=True)
    assert completion(output).finish_reason == "error"
    assert output.prompt_logprobs is None


def test_nothing_is_told_before_the_prompt_s_candidates(run):
    """They come with the first completion, and another one's first token may come before."""
    request = run(n=2, prompt_logprobs=0)
    early, _ = request.emit(43, EOS, request_id="r.1")
    assert early is None
    chunk = ({41: Logprob(-2.0, 3)}, {42: Logprob(-3.0, 4)})
    request.emit(samples=False, prompt_logprobs=chunk, request_id="r.0")
    output, _ = request.emit(44, request_id="r.0")
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert [one.token_ids for one in output.outputs] == [(44,), (43, EOS)]
    failing = run(n=2, prompt_logprobs=0)
    output, _ = failing.emit(failed=True, request_id="r.0")
    assert output.outputs[0].finish_reason == "error"


def test_without_detokenize_there_is_no_text(run, tokenizer):
    output, _ = run(detokenize=False).emit(*tokenizer.encode("the cat"), EOS)
    assert completion(output).text == ""
    assert completion(output).finish_reason == "stop"


def test_completions_come_together_in_one_output(run, tokenizer):
    request = run(n=2)
    ids = tokenizer.encode("the cat")
    output, released = request.emit(*ids, EOS, request_id="r.1")
    assert [c.text for c in output.outputs] == ["", "the cat"]
    assert released == {"r.1": len(PROMPT) + len(ids) + 1}
    assert not output.finished
    output, released = request.emit(*ids[:1], EOS, request_id="r.0")
    assert [c.index for c in output.outputs] == [0, 1]
    assert [c.text for c in output.outputs] == [tokenizer.decode(ids[:1]), "the cat"]
    assert output.finished
    assert output.metrics.speculation.num_steps == 2


def test_abort_keeps_what_is_there_and_names_what_to_release(run, tokenizer):
    request = run(n=2)
    request.emit(EOS, request_id="r.0")
    request.emit(*tokenizer.encode("the"), request_id="r.1")
    done = request.outputs.abort("r", 99.0)
    (output,) = done.outputs
    assert [c.finish_reason for c in output.outputs] == ["stop", "abort"]
    assert output.outputs[1].text == "the"
    assert output.metrics.finished_time == 99.0
    assert done.released == {"r.1": len(PROMPT) + len(tokenizer.encode("the"))}
    assert request.outputs.abort("r", 99.0).outputs == ()
