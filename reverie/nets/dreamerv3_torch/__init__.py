"""Networks of dreamerv3-torch (https://github.com/NM512/dreamerv3-torch).

It is an earlier DreamerV3 in PyTorch. Hidden layers have no bias and are followed by
layer norm with an epsilon of 1e-3 (`norm: layer1em3`); output layers have a bias. The
configs are those of the networks of the current DreamerV3.
"""
