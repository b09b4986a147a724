"""EnvACE: train tool-using language model agents by world rehearsal, without building environments."""

__version__ = "0.1.0"
