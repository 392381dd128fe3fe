"""GPU versions of parts of `nets`; the plain parts stay the reference."""
