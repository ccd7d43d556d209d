"""Layer: one process. The page of the server in a headless browser, with a model that the test controls."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
pytest.importorskip("av", reason="PyAV is not installed (extra video)")

from live_app import ask

from browser import CHROMIUM, Chromium, Page
from mllm_seqpar.data import FrameChoice
from mllm_seqpar.serving.media import MediaStore

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture
def page(service: SimpleNamespace, chromium: Chromium) -> Iterator[Page]:
    """The page, with the key of the server."""
    with chromium.page(service.base) as page:
        page.wait("document.getElementById('model')?.textContent === 'not connected'", 30)
        page.value("settings.open && key.dispatchEvent(new Event('change', void (key.value = 'secret'))); null")
        page.wait("document.getElementById('model').textContent === 'tiny'", 30)
        page.value("settings.close(); null")
        yield page


@pytest.fixture
def arrive(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event until which uploads take."""
    arrived, add = threading.Event(), MediaStore.add

    def wait(*args: Any) -> Any:
        arrived.wait(60)
        return add(*args)

    monkeypatch.setattr(MediaStore, "add", wait)
    yield arrived
    arrived.set()


def submit(page: Page, text: str) -> None:
    page.value(f"question.value = {text!r}; form.requestSubmit(); null")


def reload(page: Page) -> None:
    page.call("Page.navigate", url=page.value("location.href"))  # unlike Page.reload, it returns after the old page
    page.wait("document.getElementById('model')?.textContent === 'tiny'", 30)


def status_is(page: Page, text: str) -> None:
    page.wait(f"document.getElementById('status').textContent.includes({text!r})", 20)


def test_question_is_not_sent_while_the_video_is_uploaded(
    service: SimpleNamespace, page: Page, arrive: threading.Event, clip: Path
) -> None:
    page.choose_file("#file", clip)
    submit(page, "What is it?")
    assert not service.worker.began.wait(1.0)
    assert page.value("document.getElementById('ask').disabled")
    assert page.value("question.value") == "What is it?"
    arrive.set()
    page.wait("!document.getElementById('ask').disabled")
    page.value("form.requestSubmit(); null")
    page.wait("document.querySelector('#messages li.assistant')?.textContent.includes('One two three')")
    assert [len(job.media) for job in service.worker.jobs] == [1]


def test_question_is_not_sent_before_the_file_that_was_refused_is_removed(
    service: SimpleNamespace, page: Page, tmp_path: Path
) -> None:
    large = tmp_path / "large.mp4"
    large.write_bytes(bytes(9000))
    page.choose_file("#file", large)
    status_is(page, "(--max_upload_mb)")
    submit(page, "What is it?")
    assert not service.worker.began.wait(1.0)
    assert page.value("question.value") == "What is it?"
    press(page, "remove")
    submit(page, "What is it?")
    assert service.worker.began.wait(20)
    assert service.worker.jobs[0].media == ()


def test_cancelled_upload_leaves_no_file(
    service: SimpleNamespace, page: Page, arrive: threading.Event, clip: Path
) -> None:
    page.choose_file("#file", clip)
    page.wait("!upload.hidden")
    press(page, "remove")
    page.wait("document.getElementById('view').hidden && !document.getElementById('status').textContent", 20)
    arrive.set()
    deadline = time.monotonic() + 20
    while not any("DELETE" in line for line in service.log) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.client.files.list().data == []


def test_moments_have_pictures_times_and_a_time_line(service: SimpleNamespace, page: Page, clip: Path) -> None:
    page.choose_file("#file", clip)
    page.wait("document.getElementById('details').textContent.startsWith('0:04')", 30)
    submit(page, "What is it?")
    page.wait("document.querySelector('.moments img')?.naturalWidth > 0", 30)
    assert page.value("document.querySelector('.moments').innerText").split() == [
        *"Moments that the answer attends to 1 0:02 to 0:04 50.0%".split()
    ]
    assert page.value("!timeline.hidden && document.getElementById('scale').textContent") == "50%"
    assert page.value("[...ticks.children].map(tick => tick.textContent)") == ["0:00", "0:01", "0:02", "0:03", "0:04"]
    assert page.value("bars.children[0].style.left + ' ' + bars.children[0].style.width") == "50% 50%"
    assert "Play from 0:02" in page.value("bars.children[0].ariaLabel")
    assert page.errors[1:] == []  # the first one is the missing key


def test_progress_of_the_encoding_is_shown_and_a_stopped_answer_stays(service: SimpleNamespace, page: Page) -> None:
    watch = "new MutationObserver(() => seen.push(document.querySelector('.wait')?.textContent))"
    page.value(f"window.seen = []; {watch}.observe(messages, {{subtree: true, childList: true}}); null")
    service.worker.go.clear()
    submit(page, "What is it?")
    page.wait("document.querySelector('.text').textContent === 'One'", 20)
    assert "Frames encoded: 1 of 2" in page.value("seen")
    press(page, "stop")
    page.wait("document.querySelector('.note')?.textContent === 'Stopped.'", 20)
    assert service.worker.ended.wait(20)  # the server has stopped too
    service.worker.go.set()
    submit(page, "Go on.")
    page.wait("document.querySelectorAll('.foot').length === 2", 20)
    assert [m["content"][0]["text"] for m in service.worker.jobs[1].messages] == ["What is it?", "One", "Go on."]


def test_dropped_file_is_uploaded_and_others_are_refused(
    service: SimpleNamespace, page: Page, arrive: threading.Event
) -> None:
    def drop(name: str, kind: str) -> None:
        file = f"const d = new DataTransfer(); d.items.add(new File(['x'], {name!r}, {{type: {kind!r}}}));"
        page.value(f"(() => {{ {file} document.body.dispatchEvent(new DragEvent('drop', "
                   "{dataTransfer: d, bubbles: true, cancelable: true})); })()")  # fmt: skip

    drop("notes.txt", "text/plain")
    status_is(page, "notes.txt is not a video or an image (text/plain)")
    drop("movie.mkv", "")  # browsers know no type of some formats
    status_is(page, "movie.mkv is being uploaded")


def test_settings_are_in_the_request_and_stay_after_a_reload(service: SimpleNamespace, page: Page) -> None:
    page.value("temperature.value = '0.5'; tokens.value = '7'; tokens.dispatchEvent(new Event('change')); null")
    reload(page)
    submit(page, "What is it?")
    assert service.worker.began.wait(20)
    (job,) = service.worker.jobs
    assert (job.sampling.temperature, job.sampling.max_new_tokens) == (0.5, 7)


def test_failed_answer_can_be_asked_again(service: SimpleNamespace, page: Page) -> None:
    submit(page, "broken")
    page.wait("document.querySelector('.failed')?.textContent.includes('is damaged')", 20)
    submit(page, "What is it?")
    page.wait("document.querySelectorAll('.foot').length === 1", 20)
    sent = service.worker.jobs[1].messages
    assert [message["role"] for message in sent] == ["user"]  # the question that failed is not in the conversation


def asked_and_answered(page: Page) -> list[str]:
    """Return the questions and answers on the page; a failure is its message."""
    texts = "[...document.querySelectorAll('#messages .user, #messages .text, #messages .failed div')]"
    return page.value(f"{texts}.map(item => item.textContent).filter(text => text)")


def answered(page: Page, count: int) -> None:
    page.wait(f"document.querySelectorAll('.foot').length === {count}", 20)


def exchange(page: Page, text: str, count: int) -> None:
    """Ask a question, and wait for its answer, after which the page has this number of answers."""
    submit(page, text)
    answered(page, count)


def choose(page: Page, clip: Path) -> None:
    page.choose_file("#file", clip)
    page.wait("document.getElementById('details').textContent.startsWith('0:04')", 30)


def press(page: Page, name: str) -> None:
    page.value(f"document.getElementById({name!r}).click(); null")


def click(page: Page, text: str, number: int = -1) -> None:
    """Click the last visible button with this text, or another one of them."""
    found = f"[...document.querySelectorAll('button')].filter(b => b.textContent === {text!r} && b.checkVisibility())"
    page.value(f"{found}.at({number}).click(); null")


def texts_of(job: Any) -> list[str]:
    return [part["text"] for message in job.messages for part in message["content"] if part["type"] == "text"]


def test_conversation_video_and_draft_stay_after_a_reload(service: SimpleNamespace, page: Page, clip: Path) -> None:
    choose(page, clip)
    exchange(page, "What is it?", 1)
    submit(page, "broken")
    page.wait("!!document.querySelector('.failed')", 20)
    page.value("question.value = 'half a quest'; question.dispatchEvent(new Event('input')); null")
    reload(page)
    answered(page, 1)
    assert asked_and_answered(page) == ["What is it?", "One two three", "broken", "clip.mp4 is damaged"]
    page.wait("document.querySelector('.moments img')?.naturalWidth > 0", 30)
    assert page.value("document.getElementById('name').textContent + player.src.slice(0, 5)") == "clip.mp4blob:"
    assert page.value("question.value") == "half a quest"
    exchange(page, "And now?", 2)
    job = service.worker.jobs[-1]
    assert texts_of(job) == ["What is it?", "One two three", "And now?"] and job.media == service.worker.jobs[0].media
    press(page, "reset")
    reload(page)
    assert page.value("messages.childElementCount") == 0


def further(page: Page, clip: Path) -> None:
    """Choose a further file for the next question."""
    other = clip.with_name("other.mp4")
    other.write_bytes(clip.read_bytes())
    page.wait("!document.getElementById('further').hidden", 20)
    page.choose_file("#next", other)
    page.wait("document.getElementById('details').textContent.startsWith('0:04')", 30)
    page.wait("document.getElementById('name').textContent === 'other.mp4'", 30)
    page.wait("document.getElementById('upload').hidden", 30)


def test_further_video_is_shown_with_the_next_question(service: SimpleNamespace, page: Page, clip: Path) -> None:
    """Each request shows each video before the question that it was chosen for, also after a reload."""

    def shown() -> list[list[str]]:
        messages = [x for x in service.worker.jobs[-1].messages if x["role"] == "user"]
        return [[part["type"] for part in message["content"]] for message in messages]

    assert page.value("document.getElementById('further').hidden")
    choose(page, clip)
    exchange(page, "What is it?", 1)
    first = service.worker.jobs[-1].media
    further(page, clip)
    assert asked_and_answered(page) == ["What is it?", "One two three"]
    assert page.value("document.getElementById('details').textContent").endswith("after clip.mp4")
    assert page.value("document.getElementById('further').hidden")
    exchange(page, "And this?", 2)
    assert shown() == [["video", "text"], ["video", "text"]]
    both = service.worker.jobs[-1].media
    assert both[:1] == first and len(both) == 2 and both[1] != both[0]
    reload(page)
    answered(page, 2)
    exchange(page, "And now?", 3)
    assert shown() == [["video", "text"], ["video", "text"], ["text"]] and service.worker.jobs[-1].media == both
    assert page.value("document.querySelector('.when').textContent").startswith("0:02 to 0:04 of clip.mp4")
    click(page, "Edit", 0)  # which removes the turns after it, so the further video is shown with this question
    submit(page, "Which?")
    page.wait("document.querySelectorAll('.user').length === 1 && document.querySelectorAll('.foot').length === 1", 20)
    assert shown() == [["video", "video", "text"]]
    assert page.errors[1:] == []  # the first one is the missing key


def test_further_video_can_be_removed_before_it_is_asked_about(
    service: SimpleNamespace, page: Page, clip: Path
) -> None:
    choose(page, clip)
    exchange(page, "What is it?", 1)
    further(page, clip)
    press(page, "remove")
    assert page.value("document.getElementById('name').textContent") == "clip.mp4"
    exchange(page, "And now?", 2)
    assert len(service.worker.jobs[-1].media) == 1 and len(service.client.files.list().data) == 1
    further(page, clip)
    exchange(page, "And this?", 3)
    press(page, "reset")  # the next conversation is about the last video
    exchange(page, "What is it?", 1)
    assert len(service.worker.jobs[-1].media) == 1
    assert [file.filename for file in service.client.files.list()] == ["other.mp4"]
    press(page, "remove")
    page.wait("!document.getElementById('drop').hidden", 20)


def test_question_that_a_reload_interrupts_can_be_asked_again(service: SimpleNamespace, page: Page) -> None:
    service.worker.go.clear()
    submit(page, "What is it?")
    page.wait("document.querySelector('.text').textContent === 'One'", 20)
    assert page.value("!dispatchEvent(new Event('beforeunload', {cancelable: true}))")  # the browser asks
    reload(page)
    page.wait("document.querySelector('.note')?.textContent.startsWith('Stopped. The page was left')", 20)
    assert asked_and_answered(page) == ["What is it?", "One"]
    service.worker.go.set()
    assert page.value("dispatchEvent(new Event('beforeunload', {cancelable: true}))")
    click(page, "Regenerate")
    page.wait("document.querySelector('.text').textContent === 'One two three'", 20)


@pytest.mark.parametrize("after_reload", [False, True])
def test_video_that_the_server_has_forgotten_is_uploaded_again_and_the_conversation_stays(
    service: SimpleNamespace, page: Page, clip: Path, after_reload: bool
) -> None:
    choose(page, clip)
    exchange(page, "What is it?", 1)
    (upload,) = service.client.files.list()
    service.client.files.delete(upload.id)  # as if it was started again
    if after_reload:
        reload(page)
    else:
        submit(page, "And now?")
        page.wait("document.querySelector('.failed')?.textContent.includes('does not have clip.mp4 any more')", 20)
    status_is(page, "clip.mp4: the server does not have it any more")
    assert page.value("document.getElementById('ask').disabled")
    press(page, "again")
    page.wait("!document.getElementById('status').textContent", 20)
    if after_reload:
        submit(page, "And now?")
    else:
        click(page, "Try again")
    answered(page, 2)
    assert asked_and_answered(page) == ["What is it?", "One two three", "And now?", "One two three"]
    assert texts_of(service.worker.jobs[-1]) == ["What is it?", "One two three", "And now?"]
    assert len(service.client.files.list().data) == 1


def test_edited_question_replaces_what_follows_it(service: SimpleNamespace, page: Page) -> None:
    for number, text in enumerate(("first", "second", "third"), 1):
        exchange(page, text, number)
    page.value("question.value = 'a draft'; null")
    click(page, "Edit", 1)
    assert page.value("question.value") == "second" and page.value("!editing.hidden")
    click(page, "Cancel")
    assert page.value("question.value") == "a draft" and len(asked_and_answered(page)) == 6
    click(page, "Edit", 1)
    submit(page, "broken")
    page.wait("!!document.querySelector('.failed')", 20)
    assert asked_and_answered(page) == ["first", "One two three", "broken", "the video is damaged"]
    click(page, "Bring back the earlier answer")
    assert asked_and_answered(page)[::2] == ["first", "second", "third"]
    click(page, "Edit", 1)
    submit(page, "changed")
    page.wait("document.querySelectorAll('.user').length === 2 && document.querySelectorAll('.foot').length === 2", 20)
    assert texts_of(service.worker.jobs[-1]) == ["first", "One two three", "changed"]
    click(page, "Regenerate", 0)
    page.wait("document.querySelectorAll('.user').length === 1 && document.querySelectorAll('.foot').length === 1", 20)
    assert texts_of(service.worker.jobs[-1]) == ["first"]


def test_settings_are_used_however_the_dialog_is_closed(service: SimpleNamespace, page: Page, clip: Path) -> None:
    choose(page, clip)
    press(page, "configure")
    for name, value in {"frames": "3", "start": "1", "end": "2.5", "system": "Be brief.", "temperature": "5"}.items():
        field = f"document.getElementById({name!r})"
        page.value(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input')); null")
    page.value("document.getElementById('temperature').focus(); null")
    for _ in range(2):  # the first one shows what is wrong
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Escape", code="Escape", windowsVirtualKeyCode=27)
    page.wait("!settings.open || (settings.close(), true)", 10)
    status_is(page, "Temperature: 5 is not used")
    assert page.value("temperature.value") == ""
    exchange(page, "What is it?", 1)
    (job,) = service.worker.jobs
    assert job.media[0].frames == FrameChoice(num_frames=3, start=1.0, end=2.5)
    assert [message["role"] for message in job.messages] == ["system", "user"] and "Be brief." in texts_of(job)
    page.value("fps.value = '2'; fps.dispatchEvent(new Event('input')); null")
    assert "not both" in page.value("document.getElementById('frames').validationMessage")
    page.value("end.value = '0.5'; end.dispatchEvent(new Event('input')); null")
    assert "after the start" in page.value("document.getElementById('end').validationMessage")


def test_wrong_key_is_named_in_the_dialog(service: SimpleNamespace, chromium: Chromium) -> None:
    with chromium.page(service.base) as page:
        fault = "document.getElementById('settings')?.open && document.getElementById('key-fault').textContent"
        page.wait(f"({fault}) === 'This server needs its API key.'", 30)
        page.value("key.value = 'wrong'; key.dispatchEvent(new Event('change')); null")
        page.wait(f"({fault}) === 'This is not the key of this server.'", 30)
        page.value("key.value = 'secret'; key.dispatchEvent(new Event('input')); settings.close(); null")
        page.wait("document.getElementById('model').textContent === 'tiny'", 30)
        assert page.value("document.getElementById('key-fault').textContent") == ""


def test_ask_is_disabled_without_a_question(page: Page) -> None:
    def disabled(text: str) -> bool:
        page.value(f"question.value = {text!r}; question.dispatchEvent(new Event('input')); null")
        return page.value("document.getElementById('ask').disabled")

    assert [disabled(text) for text in ("", "a", "  ", "a b")] == [True, False, True, False]
    page.value("question.value = ''; question.dispatchEvent(new Event('input')); null")
    page.value("document.querySelector('#ideas button').click(); null")
    assert not page.value("document.getElementById('ask').disabled")


def test_busy_server_is_asked_again(service: SimpleNamespace, page: Page) -> None:
    service.worker.go.clear()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ask, service, str(number)) for number in range(2)]
        page.wait("fetch('health').then(r => r.json()).then(state => state.waiting === 1)", 20)
        submit(page, "What is it?")
        page.wait("document.querySelector('.wait')?.textContent.includes('The server is busy')", 20)
        service.worker.go.set()
        answered(page, 1)
        assert all(other.result().choices for other in others)


MARKDOWN = """# Title
A **bold *and slanted* word**, `a*b*c` and [a link](https://example.com/a_b_c).
2 * 3 * 4 and snake_case_name

3. three
4. four
   - inner
   - inner two

| a | b |
|---|:-:|
| 1 | `x` |

```html
<b>code</b>
```
> quoted
"""

HOSTILE = """<img src=x onerror="window.hacked=1"> [x](javascript:window.hacked=1) ![y](data:text/html,z)
<script>window.hacked=1</script>
```<svg onload=window.hacked=1>
"""


def html_of(page: Page, text: str) -> str:
    script = "import('./markdown.js').then(m => { const d = document.createElement('div'); d.append(...m.render(%s));"
    return page.value(script % json.dumps(text) + " document.body.append(d); return d.innerHTML })")


def test_markdown_becomes_elements(page: Page) -> None:
    assert html_of(page, MARKDOWN) == (
        "<h3>Title</h3><p>A <strong>bold <em>and slanted</em> word</strong>, <code>a*b*c</code> and "
        '<a href="https://example.com/a_b_c" target="_blank" rel="noopener noreferrer">a link</a>.<br>'
        "2 * 3 * 4 and snake_case_name</p>"
        '<ol start="3"><li><span>three</span></li><li><span>four</span><ul><li><span>inner</span></li>'
        "<li><span>inner two</span></li></ul></li></ol>"
        '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td>'
        "<td><code>x</code></td></tr></tbody></table></div>"
        '<pre tabindex="0"><code>&lt;b&gt;code&lt;/b&gt;</code></pre><blockquote><p>quoted</p></blockquote>'
    )


def test_markdown_adds_no_element_of_the_answer(page: Page) -> None:
    for end in range(1, len(HOSTILE) + 1, 5):  # as it is streamed
        html_of(page, HOSTILE[:end])
    assert html_of(page, HOSTILE).count("&lt;") == 3
    assert (
        page.value("document.querySelectorAll('body > div img, body > div script, body > div a, svg[onload]').length")
        == 0
    )
    assert page.value("window.hacked") is None
    deep = html_of(page, "> " * 5000 + "x\n" + "- " * 5000 + "\n" + "**" * 5000)
    assert deep.count("<blockquote>") < 20
