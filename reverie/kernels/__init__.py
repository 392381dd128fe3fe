"""Fast versions of modules of `nets`, mostly for GPUs; `nets` is the reference.

Conventions in Triton kernels: a *program* is one instance of a kernel, which computes
one or more *tiles* (blocks of rows and columns of a matrix). Arguments in lower case
are pointers and sizes, those in upper case compile-time constants: `R` and `C` rows and
columns of a tile, `STEPS` tiles per program. `row` and `col` are the indices of a tile,
`mask` is true for those in range, `v` are values loaded from `x`. `dx` is the gradient
of `x`, and `partial` has one partial sum per program. In norms, `gain` and `beta` are
values loaded from `scale` and `shift`, and `rstd` is one over the standard deviation.
Sizes of tiles are powers of two, as Triton requires; masks exclude the padding.
"""
