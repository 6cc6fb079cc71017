"""Runs a bundle: text in, answers out, with nothing but numpy, tokenizers and one runtime.

The same files are `optimizer.harness` here, where the evaluator uses them, and `harness` inside
every bundle, where they serve: what was measured is what runs. Hence two rules, both tested:
imports are relative and stay inside this folder; the only packages are numpy, tokenizers, jinja2
for chat templates and, inside runtimes/, the runtime itself.

In a bundle this file runs first, needs the standard library only, and compares the others with the
manifest before one of them is imported. It takes the bundle's folder off the path before anything
else is imported, so that a json.py beside it is not what `import json` means, and leaves no
bytecode, which would be code that no digest covers. It cannot vouch for itself, nor for bytecode
that Python runs in its place: `python -I -S verify.py`, or `optimize check` of an installed
toolchain, look from outside.
"""

# No `from __future__`: that is an import, and would come before the path is clean.
import os
import sys

AGAIN = "Get the bundle again."
LARGEST = 16 << 20  # bytes of a manifest, as verify.py has it
OWN_BYTECODE = "__pycache__/__init__."
"""Beginning of the name of this file's bytecode. Python has run it before this line, or not."""
STARTING = sys.argv[:1] == ["-m"]  # `python -m harness`: so it is while __main__ is looked for


def leave_no_bytecode(cached: str | None) -> None:
    """Python writes none from here on, and what it wrote of this file (`cached`) goes."""
    sys.dont_write_bytecode = True
    if cached:
        try:
            os.unlink(cached)
            os.rmdir(os.path.dirname(cached))  # the folder, unless something else is in it
        except OSError:
            pass


def damage(package: str) -> str:
    """What is wrong with the sources in the folder `package`, by the manifest beside it.

    Empty when nothing is, or when no manifest is there: then this is no bundle.
    """
    import hashlib
    import json
    from pathlib import Path

    folder = Path(package)
    path = folder.parent / "manifest.json"
    if not os.path.lexists(path):
        return ""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            raise ValueError(f"a link, no plain file, or more than {LARGEST} bytes")
        files = json.loads(path.read_bytes())["files"]
        listed = {n: f["sha256"] for n, f in files.items() if n.startswith(f"{folder.name}/")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"manifest.json cannot be read ({type(e).__name__}: {e})"
    files_here = [p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()]
    names = {p.relative_to(folder.parent).as_posix(): p for p in files_here}
    wrong = [f"{n} is missing" for n in sorted({*listed} - {*names})]
    for name, file in names.items():
        if name.startswith(f"{folder.name}/{OWN_BYTECODE}"):
            continue  # of another process that starts at this moment
        if name not in listed:
            wrong.append(f"{name} is not in the manifest")
            continue
        intact = False
        try:
            if file.is_file() and not file.is_symlink():
                with file.open("rb") as f:
                    intact = hashlib.file_digest(f, "sha256").hexdigest() == listed[name]
        except OSError as e:
            wrong.append(f"{name} cannot be read ({e.strerror})")
            continue
        if not intact:
            wrong.append(f"{name} is damaged: its digest is not the manifest's")
    return ", ".join(wrong)


def _refuse(folder: str, problem: str) -> None:
    """End `python -m harness` with a sentence (exit 2, as for any damaged bundle); a program that
    imports this package gets it as an ImportError."""
    message = f"{folder}: {problem}. {AGAIN}"  # with names that nobody looked at yet
    message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
    if not STARTING:
        raise ImportError(message)
    if "--json" in sys.argv:
        import json

        fields = {"error": "BundleError", "where": folder, "found": problem, "accepted": ""}
        print(json.dumps({"exit_code": 2, **fields, "fix": AGAIN}))
    else:
        print(message, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "harness":  # inside a bundle; here it is optimizer.harness, beside no manifest
    _bundle = os.path.realpath(os.path.dirname(__path__[0]))
    if STARTING:  # the package itself is found by its __path__
        sys.path[:] = [p for p in sys.path if os.path.realpath(p or os.curdir) != _bundle]
    leave_no_bytecode(__spec__.cached if __spec__ else None)
    _damage = damage(__path__[0])
    if _damage:
        _refuse(_bundle, _damage)
