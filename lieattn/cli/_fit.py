"""``lieattn fit``, ``validate``, ``test`` and ``predict``: their help page, which needs no import of torch."""

from __future__ import annotations

from collections.abc import Sequence

from lieattn.cli import COMMANDS
from lieattn.cli._options import asks_for_help

_HELP = """usage: lieattn {name} [--config FILE] [--SECTION.OPTION VALUE ...]

{what}. Settings are given in YAML files or on the command line, where dots
separate sections; later settings override earlier ones. examples/configs has a file for each kind of data,
examples/papers one for each experiment of the papers.

what is trained
  --model CLASS                    the task, lieattn.train.PointSetClassifier or lieattn.train.PointSetRegressor
  --model.network CLASS            the network, one of `lieattn models`, or your own by its import path
  --model.network.OPTION VALUE     an argument of its class, such as --model.network.channels 32
  --model.optimizer CLASS          the optimizer, such as torch.optim.AdamW with --model.optimizer.lr 0.01
  --model.schedule CLASS           schedule of the learning rate: WarmupCosine, MultiStep or Plateau of lieattn.train
data
  --data.train CLASS               the training set, one of `lieattn datasets`, or your own: mydata.Clouds of mydata.py
  --data.train.OPTION VALUE        an argument of its class, such as --data.train.root DIR
  --data.val, --data.test, --data.predict    the other data sets, likewise
  --data.batch_size N              clouds per batch (8); also --data.eval_batch_size, .workers, .seed, .shuffle
run
  --trainer.max_epochs N           number of passes over the training set (100)
  --trainer.default_root_dir DIR   folder for logs, checkpoints and predictions (runs)
  --trainer.accelerator NAME       cpu, gpu or auto; also --trainer.devices, .precision, .gradient_clip_val, ...
  --trainer.fast_dev_run true      run one batch of everything as a check; nothing is written
  --ckpt_path last|best|FILE       the checkpoint to load; `fit` continues its run. The others take several checkpoints
                                   and use the mean of the networks; `predict` also writes the standard deviation
  --last.every_n_train_steps N     also save the state within an epoch, every N steps
  --weights NAME|FILE              `fit` starts from the weights of a trained network; a head with other outputs is new
  --ema DECAY                      validate and save moving averages of the weights; 0.999 averages about 1000 steps
  --checkpoint_activations true    recompute activations in the backward pass, which saves memory and takes more time
  --compile true                   compile the network with torch.compile; faster on GPUs, for clouds of any sizes
  --cuda_graphs true               replay training steps on a GPU, for clouds that all have one geometry, such as images
  --seed_everything N              seed of weights, order and transforms (0)
  --trust PACKAGE ...              packages whose classes a checkpoint may use, besides this library and torch
  -c FILE, --config FILE           settings; without it, those of the checkpoint (of the run itself only for `fit`)
  --print_config                   print all settings with their defaults as YAML, and exit

the arguments of a class, and all options of training (hundreds of lines):
  lieattn {name} --model.help lieattn.train.PointSetClassifier
  lieattn {name} --model PointSetClassifier --model.network.help lieattn.models.GSANet
  lieattn {name} --data.train.help lieattn_datasets.Digits
  lieattn {name} --help-all"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Print the help page, or run the command with Lightning."""
    if asks_for_help(arguments):
        print(_HELP.format(name=name, what=COMMANDS[name].help.capitalize()))
        return 0
    from lieattn.cli import _lightning

    return _lightning.run(name, arguments)
