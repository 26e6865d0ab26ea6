"""What a newcomer meets first: dependencies that agree, targets that exist, documented names, clean files."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import zero_course

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero_course"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)


def requirements(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def project_files() -> list[Path]:
    """Files that are, or would be, in the repository."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: which files belong to the project is git's knowledge")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


# --- dependencies ------------------------------------------------------------------------------------------


def test_conda_users_get_the_same_dependencies() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    assert f"python{PROJECT['requires-python']}" in conda
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip[:2] == ["-c constraints.txt", "-e ."]
    assert {str(Requirement(line)) for line in pip[2:]} == {str(r) for r in requirements("test")}


def test_pins_are_exact_and_single() -> None:
    for pin in pins():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert Version(specifier.version).local is None, f"{pin}: a local suffix shuts out other builds"
        assert pin.url is None, pin
    for python in PYTHONS:
        names = [canonicalize_name(pin.name) for pin in pins() if applies(pin, python)]
        assert sorted(names) == sorted(set(names)), f"pinned twice for Python {python}"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_bounds(python: str) -> None:
    pinned = {canonicalize_name(pin.name): pin for pin in pins() if applies(pin, python)}
    for requirement in requirements("test", "notebooks"):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{requirement} is not in constraints.txt for Python {python}"
            (specifier,) = pinned[name].specifier
            assert requirement.specifier.contains(specifier.version), f"{requirement} against {pinned[name]}"


def test_torch_is_the_version_that_the_course_was_measured_with() -> None:
    (torch,) = [pin for pin in pins() if pin.name == "torch"]
    assert str(torch.specifier) == "==2.13.0"


def test_dependencies_have_lower_bounds_only() -> None:
    """An upper bound in a library makes it clash with its neighbours; exact versions are constraints.txt's."""
    for requirement in requirements("test", "notebooks"):
        assert [specifier.operator for specifier in requirement.specifier] == [">="], requirement


def test_everything_the_package_imports_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    declared.add("pydantic-core")  # pydantic's other half, by its documentation the home of its custom errors
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                known = top in sys.stdlib_module_names or top == "zero_course"
                assert known or canonicalize_name(top) in declared, f"{path.relative_to(ROOT)} imports {top}"


# --- the package -------------------------------------------------------------------------------------------


def test_version() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert Version(zero_course.__version__).release >= (0, 1, 0)


def test_every_folder_of_the_package_is_a_package() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), f"setuptools would leave out {path.relative_to(ROOT)}"


def test_every_exported_name_exists() -> None:
    assert len(zero_course.__all__) == len(set(zero_course.__all__))
    for name in zero_course.__all__:
        assert hasattr(zero_course, name), name


def undocumented(source: str) -> Iterator[str]:
    """Public functions, classes and methods of a piece of source that have no docstring."""

    def visit(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in node.body:
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            decorators = {getattr(decorator, "attr", "") for decorator in child.decorator_list}
            if child.name.startswith("_") or "setter" in decorators:
                continue
            if ast.get_docstring(child) is None:
                yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")

    tree = ast.parse(source)
    if ast.get_docstring(tree) is None:
        yield "the module itself"
    yield from visit(tree, "")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert not list(undocumented(path.read_text()))


def test_the_docstring_check_finds_what_is_missing() -> None:
    source = "class A:\n    '''Doc.'''\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n"
    assert list(undocumented(source)) == ["the module itself", "A.f", "h"]


# --- the Makefile and the set-up -----------------------------------------------------------------------------


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_target() -> None:
    shown = make("help").stdout
    assert make().stdout == shown, "make alone shows the help"
    listed = re.findall(r"^  make ([a-z0-9-]+) +\S", shown, re.MULTILINE)
    assert listed == TARGETS
    assert set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()) == set(TARGETS)
    expected = {"help", "setup", "demo", "test", "bench", "lint", "format", "clean"}
    assert expected | {f"lab-0{n}" for n in range(5)} <= set(TARGETS)


def test_what_the_targets_run_exists() -> None:
    for script in re.findall(r"\$\(PY\) (\S+\.py)", MAKEFILE) + re.findall(r"scripts/\S+\.sh", MAKEFILE):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"\$\(PY\) -m (zero_course\.\S+)", MAKEFILE):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module


def test_nproc_reaches_the_demo_and_the_labs() -> None:
    for target in ["demo", *(f"lab-0{n}" for n in range(5))]:
        assert re.search(r"--nproc 4\b", make("-n", target, "NPROC=4").stdout), target
        assert re.search(r"--nproc 2\b", make("-n", target).stdout), target


@pytest.mark.parametrize(
    ("fakes", "environment", "message"),
    [
        (
            {},
            {"PYTHON": "no-such-python"},
            "no-such-python was not found.*sudo apt install python3 python3-venv",
        ),
        (
            {"old-python": 'case "$*" in *version_info*) exit 1;; *) echo 3.9.2;; esac'},
            {"PYTHON": "old-python"},
            "old-python is 3.9.2",
        ),
        (
            {"bare-python": 'case "$*" in *ensurepip*) exit 1;; esac'},
            {"PYTHON": "bare-python"},
            "the modules venv and ensurepip of bare-python.*sudo apt install python3-venv",
        ),
        (
            {},
            {"PYTHON": sys.executable, "CXX": "no-such-g++"},
            r"no-such-g\+\+ was not found.*sudo apt install g\+\+",
        ),
    ],
)
def test_setup_says_what_to_install(
    tmp_path: Path, fakes: dict[str, str], environment: dict[str, str], message: str
) -> None:
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "setup.sh"), "test", str(tmp_path / "stamp")],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Please install" in done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "stamp").exists()


# --- the repository ------------------------------------------------------------------------------------------


def test_git_ignores_what_the_targets_write() -> None:
    project_files()  # skips where there is no git
    for path in (
        ".venv/bin/python",
        "results/demo/report.json",
        "results/lab_00/memory.png",
        "zero_course/__pycache__/comm.cpython-311.pyc",
        "zero_course.egg-info/PKG-INFO",
        ".pytest_cache/README.md",
        ".ruff_cache/CACHEDIR.TAG",
        ".hypothesis/examples",
    ):
        ignored = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT).returncode == 0
        assert ignored, path
    sources = [".ci/run", "zero_course/comm.py", "labs/lab_00_memory_wall/lab.py", "Makefile"]
    for path in sources:
        ignored = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT).returncode == 0
        assert not ignored, path


def test_no_file_names_a_place_that_only_its_author_has() -> None:
    folders = "|".join(["work", "farm", "root", "tmp", "home", "Users"])
    place = re.compile(rf"(?<![\w.~$}}-])/(?:{folders})/")
    host = re.compile(
        "|".join(["pypi" + r"\.org", "python" + "hosted", "anaconda" + r"\.(?:org|com)", "npm" + "js"])
    )
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a picture
        for pattern in (place, host):
            found = pattern.search(text)
            assert found is None, (
                f"{path.relative_to(ROOT)}: {text[max(0, found.start() - 40) : found.end() + 20]!r}"
            )


def test_links_between_documents_lead_somewhere() -> None:
    for path in project_files():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
                if "://" not in target:
                    assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup.sh"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK), "not executable"
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert "set -euo pipefail" in path.read_text()
