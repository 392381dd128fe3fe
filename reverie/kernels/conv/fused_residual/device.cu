// Device functions of the convolution: asynchronous copies and matrix products.

DEVICE void copy_async16(uint4* shared, const bf16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(shared)),
               "l"(from)
               : "memory");
}
DEVICE void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads four 8 x 8 matrices from shared memory. Lane i gives the address of row i % 8
// of matrix i / 8, and gets two numbers of row i / 4 of each matrix.
DEVICE void load_matrices(u32 (&to)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address(row))
               : "memory");
}
// Adds the product of a 16 x 16 and a 16 x 8 matrix.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
