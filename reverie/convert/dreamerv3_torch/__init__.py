"""Import checkpoints and configs of dreamerv3-torch (NM512/dreamerv3-torch).

`latest.pt` is a `torch.save` of two dicts: `agent_state_dict` with the tensors of the
whole agent, and `optims_state_dict` with the states of its Adam optimizers. It contains
no config: `sizes.py` infers sizes from the shapes of the tensors, and `config.py`
converts `configs.yaml`.
"""
