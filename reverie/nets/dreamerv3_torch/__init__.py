"""Networks of dreamerv3-torch (https://github.com/NM512/dreamerv3-torch).

It is an earlier version of DreamerV3 in PyTorch. Hidden layers have no bias and are
followed by layer norm with an epsilon of 1e-3 (`norm: layer1em3`); output layers have a
bias. The config classes are those of the DreamerV3 networks in `nets`.
"""
