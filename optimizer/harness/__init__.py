"""Runs a bundle: text in, answers out, with nothing but numpy, tokenizers and one runtime.

The same files are `optimizer.harness` here, where the evaluator uses them, and `harness` inside
every bundle, where they serve: what was measured is what runs. Hence two rules, both tested:
imports are relative and stay inside this folder; the only packages are numpy, tokenizers, jinja2
for chat templates and, inside runtimes/, the runtime itself.
"""
