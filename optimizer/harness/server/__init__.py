"""Answer over the network: the code behind `python -m harness serve`.

inference.py    the Open Inference Protocol v2 without its transport; tensors.py: its tensors
model.py        a bundle as a server uses it; text_model.py: one that continues texts
answers.py      requests to a model that continues texts, and the tokens of their answers
embedded.py     a bundle inside another server, which forms the batches
options.py      the options of serve; from_options.py, settings.py: what follows from them
refusals.py     errors that end a request without an answer
http/           HTTP: the ASGI application, its paths, OpenAI's interface, and two servers for it
grpc/           the Open Inference Protocol v2 over gRPC
scheduling/     batches and slots: which waiting requests run next, and the threads they run in
warm_up/        shapes, times and exactness, measured before the first request
caches/         answers that were given before, to equal and to similar requests
versions/       versions of a model, their loading, and trials between them
observe/        metrics, traces, and the trace that a request is part of
The commands that use it are in harness/commands/: serve.py, application.py, ask.py.
"""
