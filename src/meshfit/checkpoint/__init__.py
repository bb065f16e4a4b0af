"""Checkpoints: saved under any plan, loaded under any other, exactly. See docs/checkpoint.md.

Saver, save      a run, as it goes or now                    saver.py, write.py
restore          a run goes on from one                      load.py
newest           the checkpoint that a path stands for       manifest.py
export           to safetensors and Hugging Face's layout    export.py
load_weights     from them, .pt files and torch's DCP        weights.py, outside.py
"""

from meshfit.checkpoint.load import restore
from meshfit.checkpoint.manifest import Manifest, newest
from meshfit.checkpoint.saver import Saver, save
from meshfit.errors import CheckpointError, Damaged

__all__ = ["CheckpointError", "Damaged", "Manifest", "Saver", "newest", "restore", "save"]
