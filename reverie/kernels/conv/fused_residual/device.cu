// What tiles ask of the machine besides: copies on their way, and products of matrices.

DEVICE void send(uint4* shared, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(shared)),
               "l"(from)
               : "memory");
}
DEVICE void await_sent() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 x 8, whose rows are in shared memory: lane i knows that of row
// i % 8 of matrix i / 8, and gets two numbers of row i / 4 of each.
DEVICE void collect(u32 (&to)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address(row))
               : "memory");
}
// Adds the product of 16 x 16 and 16 x 8 numbers.
DEVICE void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
