"""GPU twins of the plain parts, one file each; the plain parts stay the reference."""
