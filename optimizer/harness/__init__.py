"""Run a bundle: text in, answers out, with numpy, tokenizers and one runtime only.

The same files are `optimizer.harness` here, for the evaluator, and `harness` in every bundle, so
the measured code is the code that runs. Hence two rules, both tested: imports are relative and stay
in this folder; the only packages are numpy, tokenizers, jinja2 for chat templates and, in
runtimes/, the runtime itself.

In a bundle this file runs first, needs the standard library only, and compares all other files with
the manifest before they are imported. It first removes the bundle's folder from the path, so that a
json.py in it does not replace Python's, and writes no bytecode, which no digest would cover. It
cannot verify itself or bytecode that Python runs instead of it; `python -I -S verify.py`, or
`optimize check` of an installed toolchain, verify a bundle from outside.
"""

# No `from __future__`: that is an import, and would come before the path is clean.
import os
import sys

AGAIN = "Get the bundle again."
LARGEST = 16 << 20  # maximum bytes of a manifest, as in verify.py
OWN_BYTECODE = "__pycache__/__init__."
"""Prefix of the name of this file's bytecode, which Python may have run already."""
STARTING = sys.argv[:1] == ["-m"]  # true in `python -m harness`, while Python finds __main__


def leave_no_bytecode(cached: str | None) -> None:
    """Stop writing bytecode into the bundle, and remove the file `cached`, the bytecode of this
    file, if any."""
    sys.dont_write_bytecode = True
    if cached:
        try:
            os.unlink(cached)
            os.rmdir(os.path.dirname(cached))  # the folder, if it is empty
        except OSError:
            pass


def describe_damage(package: str) -> str:
    """Return in one text how files in the folder `package` differ from the bundle's manifest.

    "" if nothing differs, and without a manifest, where this is not a bundle.
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
            raise ValueError(f"a link, not a plain file, or more than {LARGEST} bytes")
        files = json.loads(path.read_bytes())["files"]
        listed = {n: f["sha256"] for n, f in files.items() if n.startswith(f"{folder.name}/")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"manifest.json cannot be read ({type(e).__name__}: {e})"
    files_here = [p for p in sorted(folder.rglob("*")) if p.is_symlink() or not p.is_dir()]
    names = {p.relative_to(folder.parent).as_posix(): p for p in files_here}
    wrong = [f"{n} is missing" for n in sorted({*listed} - {*names})]
    for name, file in names.items():
        if name.startswith(f"{folder.name}/{OWN_BYTECODE}"):
            continue  # another process starts at this moment
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
    """End `python -m harness` with a message (exit 2, as for any damaged bundle); raise ImportError
    in a program that imports this package."""
    message = f"{folder}: {problem}. {AGAIN}"  # file names are not verified yet
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


if __name__ == "harness":  # in a bundle; here the name is optimizer.harness
    _bundle = os.path.realpath(os.path.dirname(__path__[0]))
    if STARTING:  # the package itself is found by its __path__
        sys.path[:] = [p for p in sys.path if os.path.realpath(p or os.curdir) != _bundle]
    leave_no_bytecode(__spec__.cached if __spec__ else None)
    _damage = describe_damage(__path__[0])
    if _damage:
        _refuse(_bundle, _damage)
