"""Layer: one process. Jobs about videos and images on ranks that are threads, and jobs that cannot be answered."""

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from family_directories import MAKERS, family_folder
from mllm_seqpar.chats.clip import Clip
from mllm_seqpar.cli.options import parse_options
from mllm_seqpar.comm import Communicator, run_loopback
from mllm_seqpar.comm.agreement import agree
from mllm_seqpar.data import FrameChoice, chat_family
from mllm_seqpar.errors import NonFiniteLogitsError, SeqParError, VideoError
from mllm_seqpar.inference import Sampling
from mllm_seqpar.inference.conversation import Conversation, LengthError
from mllm_seqpar.inference.encoding import Interrupted
from mllm_seqpar.inference.engine import Engine
from mllm_seqpar.inference.generation import Answer
from mllm_seqpar.inference.job import Job, JobError, Outcome
from mllm_seqpar.models.loading import load_processor
from mllm_seqpar.patching import patch_of
from mllm_seqpar.serving.chat import ChatOptions
from mllm_seqpar.serving.jobs import Worker
from model_copies import load_model
from selections import slow_unless

pytestmark = pytest.mark.usefixtures("load_models_once")
CPU = torch.device("cpu")
FEW = Sampling(max_new_tokens=5)


@pytest.fixture
def video(inference_files: Path) -> Clip:
    return Clip.of_file("video", str(inference_files / "clip.mp4"), FrameChoice(num_frames=3))


def on_ranks(world: int, model: Path, body: Callable[[Engine], Any], keep: int = 1) -> list[Any]:
    args = parse_options(ChatOptions, ["--model", str(model), "--encode-batch", "2"], prog="chat", description="")

    def run(comm: Communicator) -> Any:
        engine = Engine(args, comm, CPU, keep)
        engine.load()
        return body(engine)

    return run_loopback(world, run)


def job(*media: Clip, question: str = "What is it?", sampling: Sampling = FEW) -> Job:
    content = [*({"type": file.kind} for file in media), {"type": "text", "text": question}]
    return Job(messages=[{"role": "user", "content": content}], media=media, sampling=sampling)


def answer(engine: Engine, asked: Job, progress: Any = None, interrupted: Any = None) -> Answer:
    try:
        conversation, prompt = engine.begin(asked, progress, interrupted)
        return engine.computed(lambda: conversation.answer(prompt, asked.sampling, evidence=asked.evidence))
    except JobError as error:
        error.raise_cause()


def run(worker: Worker, asked: Job, **options: Any) -> Answer:
    """Run a job on rank 0, and what rank 0 sends on the others."""
    if worker.engine.comm.rank == 0:
        return worker.run(asked, **options)
    found = worker.follow_one()
    if isinstance(found, JobError):
        raise found
    assert found is not None
    return found


def test_job_survives_its_way_to_the_other_ranks(video: Clip) -> None:
    asked = Job(messages=[{"role": "user", "content": "?"}], media=(video,), sampling=FEW, stop=("x", "y"))
    assert Job.from_json(asked.to_json()) == asked


RANDOM = {"min_new_tokens": 6, "temperature": 1.3, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.4}
SAMPLED = Sampling(max_new_tokens=8, seed=3, **RANDOM)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mllama", "moss_vl", *(name for name in MAKERS if "qwen" in name)])
@pytest.mark.parametrize("sampling", [FEW, SAMPLED], ids=["greedy", "sampled"])
def test_videos_and_images_in_one_message_equal_the_unpatched_model(name: str, sampling: Sampling) -> None:
    folder = family_folder()
    model = folder / name
    clip = Clip.of_file("video", str(folder / "clip.mp4"), FrameChoice(num_frames=3))
    images = [Clip.of_file("image", str(folder / f"{number}.png")) for number in (1, 2)]
    asked = job(images[0], clip, images[1], sampling=sampling)
    worlds = (1, 2) if sampling is FEW else (1,)  # ranks that are threads share their random numbers
    replies = [reply for world in worlds for reply in on_ranks(world, model, lambda engine: answer(engine, asked))]

    processor, unpatched = load_processor(str(model)), load_model(str(model)).eval()
    chat_format = chat_family(processor)
    sources = [file.open(chat_format) for file in asked.media]
    text = chat_format.text([asked.messages], [sources], add_generation_prompt=True)
    pictures = chat_format.unsharded(*sources)
    torch.manual_seed(sampling.seed)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": sampling.max_new_tokens}
    if sampling is SAMPLED:
        options |= RANDOM | {"do_sample": True}
    output = unpatched.generate(**chat_format.arguments(text), **pictures, **options)
    expected = output[0, text.input_ids.shape[1] :].tolist()
    assert all(reply.tokens == expected for reply in replies)


@pytest.mark.parametrize("name", [name for name in MAKERS if "qwen" in name])
def test_evidence_of_a_decoder_only_model_names_the_medium_and_its_frames(name: str) -> None:
    """The second job continues the kept conversation."""
    folder = family_folder()
    clip = Clip.of_file("video", str(folder / "clip.mp4"), FrameChoice(num_frames=3))
    image = Clip.of_file("image", str(folder / "1.png"))
    first, again = (replace(job(image, clip), evidence=number) for number in (9, 3))
    found = [
        reply
        for world in (1, 2)
        for reply in on_ranks(world, folder / name, lambda engine: [answer(engine, x) for x in (first, again)])
    ]
    for one, other in found:
        frames = [(frame, x.medium) for x in one.evidence.moments for frame in range(x.first, x.last + 1)]
        assert sorted(frames) == [(0, 0), (1, 1), (2, 1), (3, 1)]  # the video's frames are two temporal patches
        assert other.cached_tokens > 0
        for moments, count in ((one.evidence.moments, 9), (other.evidence.moments, 3)):
            assert [x.share for x in moments] == pytest.approx(
                [x.share for x in found[0][0].evidence.moments[:count]], rel=1e-4
            )


def test_job_that_fails_on_all_ranks_is_followed_by_the_next(
    inference_files: Path, video: Clip, tmp_path: Path
) -> None:
    damaged, calls = tmp_path / "cut.mp4", []
    damaged.write_bytes((inference_files / "clip.mp4").read_bytes()[:20_000])
    broken = Clip.of_file("video", str(damaged), FrameChoice(num_frames=3))

    def body(engine: Engine) -> tuple[list[type], Answer]:
        def error_of(asked: Job, interrupted: Any = None) -> type[Exception]:
            with pytest.raises(SeqParError) as error:
                answer(engine, asked, progress=None, interrupted=interrupted)
            return type(error.value)

        answer(engine, job(video))
        long, marked = job(video, sampling=Sampling(max_new_tokens=5000)), job(video, question="<|im_end|>")
        errors = [error_of(asked) for asked in (job(broken), long, marked)]
        again = answer(engine, job(video), progress=lambda *_: calls.append(1))
        other = job(Clip.of_file("video", video.source, FrameChoice(num_frames=4)))
        return [*errors, error_of(other, (lambda: True) if engine.comm.rank == 0 else None)], again

    (errors, again), (_, again_1) = on_ranks(2, inference_files / "gated", body)
    assert errors[1] is LengthError and errors[3] is Interrupted
    assert again.tokens == again_1.tokens and again.cached_tokens == again.prompt_tokens - 1
    assert not calls  # the frames stayed encoded


FAILURES = {
    "out of memory: use fewer frames, or start more ranks": torch.OutOfMemoryError("no memory"),
    "rank 1: KeyError: 'name'": KeyError("name"),
    "rank 1: odd": VideoError("odd"),  # an error of the input, which rank 0 does not have
}


def test_failure_of_one_rank_makes_all_ranks_forget(
    inference_files: Path, video: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, errors = Conversation.encode, iter(FAILURES.values())

    def fail_on_rank_1(self: Conversation, *args: Any) -> None:
        encode(self, *args)
        if self.frames == 4 and self._comm.rank == 1:
            raise next(errors)

    def body(engine: Engine) -> tuple[list[str], list[int]]:
        worker = Worker(engine)
        choices = [FrameChoice(num_frames=count) for count in (3, 2, 4)]
        first, second, failing = (Clip.of_file("video", video.source, frames) for frames in choices)

        def cached_tokens(*files: Clip) -> list[int]:
            return [run(worker, job(file)).cached_tokens for file in files]

        texts, cached = [], cached_tokens(first, second, first)
        for _ in FAILURES:
            with pytest.raises(JobError) as raised:
                run(worker, job(failing))
            texts.append(str(raised.value))
            cached += cached_tokens(second, first, second)
        return texts, cached

    monkeypatch.setattr(Conversation, "encode", fail_on_rank_1)
    (texts, cached), (_, cached_1) = on_ranks(2, inference_files / "gated", body, keep=2)
    assert all(message in text for message, text in zip(FAILURES, texts, strict=True)), texts
    assert cached == cached_1 and [count > 0 for count in cached] == [False, False, True] * (1 + len(FAILURES))


@pytest.mark.parametrize("world", [1, 2])
def test_error_before_the_first_pass_is_an_error_of_the_job(
    inference_files: Path, video: Clip, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    refused = Sampling(max_new_tokens=5, temperature=1.0, seed=7)
    arguments = Sampling.generate_arguments
    monkeypatch.setattr(  # transformers refuses an integer, after the ranks have compared their arguments
        Sampling, "generate_arguments", lambda self: arguments(self) | ({"temperature": 2} if self == refused else {})
    )

    encoded: list[int] = []

    def body(engine: Engine) -> None:
        worker = Worker(engine)
        expected = run(worker, job(video)).tokens
        with pytest.raises(JobError, match="strictly positive float") as raised:
            run(worker, job(video, sampling=refused))
        assert raised.value.outcome is Outcome.INVALID
        assert run(worker, job(video), progress=lambda *_: encoded.append(1)).tokens == expected

    on_ranks(world, inference_files / "gated", body)
    assert not encoded  # the frames stayed encoded


@pytest.mark.parametrize(
    ("world", "error", "temperature", "raised", "message"),
    [
        (1, torch.OutOfMemoryError("no memory"), 0.0, JobError, "use fewer frames, or start more ranks"),
        (1, KeyError("name"), 0.0, JobError, "name"),
        (2, KeyError("name"), 0.0, KeyError, "name"),  # the other rank may wait, so the program ends
        *((world, None, temperature, JobError, "not finite") for world, temperature in ((1, 1.0), (2, 0.0), (2, 1.0))),
    ],
)
def test_error_in_a_pass_is_that_of_the_job_unless_other_ranks_may_wait(
    inference_files: Path,
    video: Clip,
    world: int,
    error: Exception | None,
    temperature: float,
    raised: type[Exception],
    message: str,
) -> None:
    """Without an error, the logits are NaN."""

    def fail(*args: Any) -> None:
        assert error is not None
        raise error

    def body(engine: Engine) -> None:
        worker, model = Worker(engine), engine.model
        expected = run(worker, job(video)).tokens
        if error is None:
            hook = model.get_output_embeddings().register_forward_hook(lambda *call: call[-1] * torch.nan)  # type: ignore[operator]
        else:
            hook = model.get_input_embeddings().register_forward_pre_hook(fail)  # type: ignore[operator]
        with pytest.raises(raised, match=message) as found:
            run(worker, job(video, sampling=Sampling(max_new_tokens=5, temperature=temperature)))
        hook.remove()
        if isinstance(found.value, JobError):
            assert isinstance(found.value.cause, NonFiniteLogitsError if error is None else type(error))
            assert run(worker, job(video)).tokens == expected

    on_ranks(world, inference_files / "gated", body)


def test_features_of_an_impossible_job_are_freed_at_once(
    inference_files: Path, video: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    features: list[weakref.ref[torch.Tensor]] = []

    def fail(comm: Any, *args: Any) -> None:
        encoded = torch.zeros(3)
        features.append(weakref.ref(encoded))
        agree(comm, "reading", error=torch.OutOfMemoryError("no memory"))

    def body(engine: Engine) -> bool:
        monkeypatch.setattr(Conversation, "encode", lambda self, *_: fail(engine.comm))
        freed: list[bool] = []
        monkeypatch.setattr(Engine, "forget", lambda self: freed.append(features[0]() is None))
        gc.disable()
        try:
            with pytest.raises(JobError):
                run(Worker(engine), job(video))
        finally:
            gc.enable()
        return freed == [True]

    assert on_ranks(1, inference_files / "gated", body) == [True]


@pytest.mark.parametrize("method", ["encode", "answer"])
def test_conversation_that_is_out_of_memory_is_freed_at_once(
    inference_files: Path, video: Clip, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    begun: list[weakref.ref[Conversation]] = []

    def fail(conversation: Conversation, *args: Any, **options: Any) -> None:
        begun.append(weakref.ref(conversation))
        raise torch.OutOfMemoryError("no memory")

    def body(engine: Engine) -> bool:
        monkeypatch.setattr(Conversation, method, fail)
        gc.disable()
        try:
            with suppress(JobError):
                run(Worker(engine), job(video))
            return begun[0]() is None
        finally:
            gc.enable()

    assert on_ranks(1, inference_files / "gated", body) == [True]


def test_raised_cause_has_the_errors_before_it_in_its_traceback_and_not_the_job_error() -> None:
    cause = RuntimeError("the frames cannot be shown")
    cause.__context__ = before = KeyError("missing")
    with pytest.raises(RuntimeError) as raised:
        try:
            raise JobError(cause, Outcome.FAILED) from cause
        except JobError as error:
            error.raise_cause()
    assert raised.value is cause and cause.__context__ is before and not cause.__suppress_context__


def test_ranks_of_an_engine_need_the_same_model(inference_files: Path) -> None:
    def body(comm: Communicator) -> None:
        model = inference_files / ("gated" if comm.rank else "fused")
        Engine(parse_options(ChatOptions, ["--model", str(model)], prog="chat", description=""), comm, CPU)

    with pytest.raises(SeqParError, match="the ranks differ in model"):
        run_loopback(2, body)


@pytest.mark.parametrize(("world", "shard_prompt_from"), [(1, None), (2, None), (2, 1)])
@pytest.mark.parametrize("name", slow_unless(lambda name: name == "gated", [*MAKERS, "gated"]))
def test_prefill_ends_on_all_ranks_and_the_next_answer_is_right(
    name: str, world: int, shard_prompt_from: int | None, inference_files: Path
) -> None:
    folder = inference_files if name == "gated" else family_folder()
    clip = Clip.of_file("video", str(folder / "clip.mp4"), FrameChoice(num_frames=3))

    def body(engine: Engine) -> tuple[list[int], list[Answer]]:
        worker, calls, patch = Worker(engine), [0], patch_of(engine.model)
        assert patch is not None
        patch.context.config = replace(patch.context.config, shard_prompt_from=shard_prompt_from)
        sites = patch.sites
        for site in sites:
            site.register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))

        def interrupted() -> bool:
            return calls[0] >= 1

        def ask(**more: Any) -> Answer:
            calls[0] = 0
            return run(worker, replace(job(clip), evidence=2), **(more if engine.comm.rank == 0 else {}))

        before = ask()
        engine.forget()
        stopped = ask(interrupted=interrupted)
        computed = calls[0]
        return [computed, len(sites)], [before, stopped, ask(), ask()]

    for (computed, sites), answers in on_ranks(world, folder / name, body):
        before, stopped, after, again = answers
        assert (stopped.finish_reason, stopped.text, stopped.tokens) == ("interrupted", "", [])
        assert computed in (1, 2) and computed < sites  # a module begins before or after it is counted
        assert before.tokens == after.tokens == again.tokens and after.cached_tokens == 0 < again.cached_tokens


@pytest.mark.parametrize(
    ("name", "world"),
    slow_unless(lambda row: row in (("gated", 2), ("mllama", 1)), itertools.product([*MAKERS, "gated"], (1, 2))),
)
def test_long_continuation_is_computed_in_chunks(
    name: str, world: int, inference_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = inference_files if name == "gated" else family_folder()
    clip = Clip.of_file("video", str(folder / "clip.mp4"), FrameChoice(num_frames=3))
    first = replace(job(clip), evidence=3)
    says = {"role": "assistant", "content": [{"type": "text", "text": "A dot."}]}
    asks = {"role": "user", "content": [{"type": "text", "text": "Where is it, when does it move, and what is it?"}]}
    second = replace(first, messages=[*first.messages, says, asks])

    def body(engine: Engine) -> tuple[list[Answer], list[int]]:
        rows: list[int] = []
        engine.model.register_forward_pre_hook(
            lambda model, args, given: rows.append(given["input_ids"].shape[1] if "input_ids" in given else 0),
            with_kwargs=True,
        )
        replies = [answer(engine, asked) for asked in (first, second)]
        worker = Worker(engine)
        run(worker, first)
        polls = iter([False] * 3 + [True] * 99)  # within the second chunk, or the first if a model has more layers
        wants = {"interrupted": lambda: next(polls)} if engine.comm.rank == 0 else {}
        return [*replies, run(worker, second, **wants), run(worker, second)], rows

    found = []
    for chunk in (4096, 9):
        monkeypatch.setattr("mllm_seqpar.inference.conversation.PREFILL_CHUNK", chunk)
        found.append(on_ranks(world, folder / name, body))
    for (whole, _), (chunks, rows) in zip(*found, strict=True):
        assert [reply.tokens for reply in chunks] == [reply.tokens for reply in whole]
        assert [reply.cached_tokens for reply in chunks] == [reply.cached_tokens for reply in whole]
        assert chunks[2].finish_reason == "interrupted" and chunks[3].tokens == whole[1].tokens
        for mine, expected in zip(chunks[:2], whole[:2], strict=True):
            shares = [[moment.share for moment in reply.evidence.moments] for reply in (mine, expected)]  # type: ignore
            assert shares[0] == pytest.approx(shares[1], rel=1e-4)
        assert rows.count(9) >= 2 or not any(rows)


@pytest.mark.parametrize("ranks", [1, 3])
def test_message_with_a_further_video_continues_the_conversation(
    ranks: int, inference_files: Path, video: Clip
) -> None:
    other = replace(video, frames=FrameChoice(num_frames=4))
    begun = job(video)
    turns = [*begun.messages, {"role": "assistant", "content": "A cat."}, *job(other, question="And this?").messages]
    further = replace(begun, messages=turns, media=(video, other), evidence=2)

    def body(engine: Engine) -> list[Answer]:
        return [answer(engine, asked) for asked in (begun, further)]

    for first, second in on_ranks(ranks, inference_files / "gated", body):
        assert second.cached_tokens >= first.prompt_tokens
        (anew,) = on_ranks(1, inference_files / "gated", lambda engine: answer(engine, further))
        assert second.tokens == anew.tokens and not anew.cached_tokens
        assert second.evidence is not None and anew.evidence is not None
        found, expected = ([moment.share for moment in x.evidence.moments] for x in (second, anew))
        assert found == pytest.approx(expected, abs=1e-5)


def test_video_after_a_conversation_of_text_alone_begins_its_own(inference_files: Path, video: Clip) -> None:
    """A conversation without media, of this or another client, has nothing that media could follow."""
    question = replace(job(video), messages=[{"role": "user", "content": "Hello?"}], media=())

    def body(engine: Engine) -> list[Answer]:
        replies = [answer(engine, asked) for asked in (question, job(video))]
        engine.forget()
        return [*replies, answer(engine, job(video))]

    ((_, continued, alone),) = on_ranks(1, inference_files / "gated", body)
    assert continued.tokens == alone.tokens and not continued.cached_tokens
