"""Fast versions of modules of `nets`, mostly for GPUs; `nets` is the reference.

Conventions in Triton kernels: a *program* is one instance of a kernel, which computes
one or more *tiles* (blocks of rows and columns of a matrix). Arguments in lower case
are pointers and sizes, those in upper case compile-time constants: `R` and `C` rows and
columns of a tile, `STEPS` tiles per program. `dx` is the gradient of `x`.
"""
