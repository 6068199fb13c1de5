"""Promises 1 and 2 for the policy layer: no local verb in it, and no word of the transport in what a model reads."""

import ast
import re
from pathlib import Path

import pytest

import asp_agent
from asp_agent import prompt, wording
from asp_agent.tools import DEFAULT_TOOLS

AGENT = Path(asp_agent.__file__).parent
TOOL_FILES = sorted((AGENT / "tools").glob("*.py"))
BANNED = {"os", "subprocess", "shutil", "socket", "io", "tempfile", "importlib"}
NEVER = {"subprocess", "pty", "multiprocessing"}
LOCAL_EXEC = {
    "popen",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "subprocess_exec",
    "posix_spawn",
    "execv",
    "fork",
}
FORBIDDEN_WORDS = re.compile(
    r"\b(ssh|sftp|asp|transport|remote|server|connection|host|local|laptop|machine|harness|sandbox)\b", re.IGNORECASE
)


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} | {alias.name for alias in node.names if node.module == "pathlib"}
    return found


@pytest.mark.parametrize("file", TOOL_FILES, ids=lambda file: file.name)
def test_tools_have_no_local_verb(file: Path) -> None:
    tree = ast.parse(file.read_text())
    found = imports(tree)
    assert not found & BANNED
    assert "Path" not in found
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"open", "exec", "eval", "__import__", "compile"}


@pytest.mark.parametrize("file", sorted(AGENT.rglob("*.py")), ids=lambda file: str(file.relative_to(AGENT)))
def test_the_agent_starts_no_process(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not imports(tree) & NEVER
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not {node.attr for node in attributes} & LOCAL_EXEC
    assert "os.system" not in {ast.unparse(node) for node in attributes}


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [*_strings(key), *_strings(item)]]
    return [text for item in value for text in _strings(item)] if isinstance(value, list | tuple) else []


def test_the_model_is_not_told() -> None:
    texts = [prompt.system_prompt({"directory": "/w", "system": "Linux x86_64", "user": "a"}, "/w")]
    for tool in DEFAULT_TOOLS:
        texts += [tool.schema.name, tool.schema.description, *_strings(tool.schema.parameters)]
    for file in [*TOOL_FILES, AGENT / "wording.py"]:
        tree = ast.parse(file.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body and isinstance(node.body[0], ast.Expr)
        }  # fmt: skip
        constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings]
        texts += [
            str(node.value) for node in constants if isinstance(node.value, str) and " " in node.value and "\n" not in node.value
        ]
    told = [text for text in texts if FORBIDDEN_WORDS.search(text) and text not in _attribute_docstrings()]
    assert not told
    assert wording.CONTINUE in texts


def _attribute_docstrings() -> set[str]:
    """Strings below a constant or a type alias: for readers of the code, as docstrings are."""
    found: set[str] = set()
    for file in [*TOOL_FILES, AGENT / "wording.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.add(str(node.value.value))
    return found
