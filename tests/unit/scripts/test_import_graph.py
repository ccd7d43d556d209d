"""Layer: pure Python. Which tests `scripts/test.sh --quick` runs for a change."""

from import_graph import ROOT, affected_tests


def names(*changed: str) -> set[str]:
    found = affected_tests(changed)
    assert found is not None
    return {str(path.relative_to(ROOT / "tests")) for path in found}


def test_tests_of_a_module_and_of_what_imports_it_are_selected() -> None:
    found = names("mllm_seqpar/comm/base.py")
    assert {
        "unit/comm/test_loopback_transport.py",
        "families/test_exactness.py",
        "unit/training/test_batches.py",
    } <= found
    found = names("mllm_seqpar/cli/check_data.py")
    assert "unit/cli/test_check_data.py" in found and "families/test_exactness.py" not in found


def test_names_imported_on_first_use_count_as_imports() -> None:
    assert "unit/chat_families/test_collator.py" in names("mllm_seqpar/training/collator.py")
    assert "families/test_exactness.py" in names("patches/mllama.py")
    assert "unit/chat_families/test_family_inputs.py" in names("patches/chats/mllama.py")
    assert "families/test_exactness.py" in names("scripts/lib/tiny_models/mllama.py")
    assert "families/test_exactness.py" in names("mllm_seqpar/kernels/triton_intervals.py")


def test_pages_and_documents_select_their_tests() -> None:
    assert "unit/serving/test_app.py" in names("mllm_seqpar/serving/page/page.js")
    assert "unit/test_docs.py" in names("docs/index.md")
    assert "unit/serving/test_app.py" not in names("docs/index.md")


def test_other_files_select_everything() -> None:
    assert affected_tests(["pyproject.toml"]) is None and affected_tests(["tests/conftest.py"]) is None
