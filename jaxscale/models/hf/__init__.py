"""Hugging Face directories: their configuration keys, tensors and files.

Bottom up: `files` (safetensors on disk), `names` (which tensor holds which parameter),
`tensors` (parameters from and to files), `keys` (settings of ``config.json``), `family`
(what a family of models says about all of these), `sentence_transformers` (how a
directory embeds sentences). A file of `jaxscale.models` holds each family,
`jaxscale.models.families.registry` lists them, and `load` and `save` stand above.
"""
