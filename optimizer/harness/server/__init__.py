"""Answer requests over the network: the code behind `python -m harness serve`.

request.py      a request over HTTP or gRPC
inference.py    the Open Inference Protocol v2 without its transport; tensors.py: its tensors
model.py        a bundle behind a server; text_model.py: a bundle for text generation
answers.py      prompts of a generation request, and the tokens of its answers
embedded.py     a bundle inside another server, which forms the batches
options.py      options and settings of serve
refusals.py     errors that end a request without an answer
http/           HTTP: the server, the ASGI application, its paths, OpenAI's interface
grpc/           the Open Inference Protocol v2 over gRPC
scheduling/     schedulers of batches and slots, and the threads of the model
warm_up/        shapes, times and exactness, measured before the first request
caches/         answers to equal and to similar requests
versions/       versions of a model, their loading, and trials between them
observe/        metrics and traces
Used by harness/commands/: serve.py, application.py, ask.py.
"""
