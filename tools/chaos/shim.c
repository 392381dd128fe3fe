/* Faults in the file calls of a process, for LD_PRELOAD.
 *
 * Counts the calls of each kind on files below a folder. At the n-th call of
 * one kind, the process is killed with SIGKILL, or the call fails with an error number.
 * If that call is a write, half of the data is written first (a torn write). Calls on
 * other files are not changed. `chaos_arm` is called with ctypes after a fork.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum kind { OPEN, WRITE, FSYNC, RENAME, AFTER_RENAME, UNLINK, MKDIR, TRUNCATE, READ,
            LIST, STAT, KINDS };
static const char *const names[KINDS] = {
    "open",  "write",    "fsync", "rename", "after_rename", "unlink",
    "mkdir", "truncate", "read",  "list",   "stat"};

static char folder[PATH_MAX];
static size_t folder_length;          /* 0: no faults, no counting */
static int fault_kind = -1;
static long fault_at;
static int fault_error;               /* 0: kill */
static int fault_persistent;               /* all later calls of the kind fail, too */
static atomic_long counts[KINDS];

/* Returns 0, or -1 for an unknown kind. An empty kind only counts. */
int chaos_arm(const char *path, const char *kind, long at, int error, int persistent) {
  fault_kind = -1;
  for (int i = 0; i < KINDS; i++) {
    atomic_store(&counts[i], 0);
    if (!strcmp(kind, names[i])) fault_kind = i;
  }
  if (*kind && fault_kind < 0) return -1;
  fault_at = at;
  fault_error = error;
  fault_persistent = persistent;
  snprintf(folder, sizeof folder, "%s", path);
  folder_length = strlen(folder);
  return 0;
}

long chaos_count(const char *kind) {
  for (int i = 0; i < KINDS; i++)
    if (!strcmp(kind, names[i])) return atomic_load(&counts[i]);
  return -1;
}

static int is_below(const char *path) {
  return folder_length && !strncmp(path, folder, folder_length) &&
         (path[folder_length] == '/' || !path[folder_length]);
}

static int is_fd_below(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder_length) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_below(path);
}

static int is_at_below(int fd, const char *path) {
  if (!folder_length || !path) return 0;
  if (*path == '/') return is_below(path);
  if (fd != AT_FDCWD) return is_fd_below(fd);
  char current[PATH_MAX];
  return getcwd(current, sizeof current) && is_below(current);
}

/* Counts a call; returns true if it has to fail, or to kill the process. */
static int is_due(enum kind kind) {
  long count = atomic_fetch_add(&counts[kind], 1) + 1;
  if (fault_kind != (int)kind) return 0;
  return count == fault_at || (fault_persistent && count > fault_at);
}

static int fail(void) {
  if (!fault_error) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = fault_error;
  return -1;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPEN_CALL(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = va_arg(arguments, mode_t); \
    va_end(arguments); \
    if (WRITES(flags) && is_at_below(AT_FDCWD, path) && is_due(OPEN)) return fail(); \
    return real(path, flags, mode); \
  }
OPEN_CALL(open)
OPEN_CALL(open64)

#define OPENAT_CALL(name) \
  int name(int fd, const char *path, int flags, ...) { \
    REAL(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = va_arg(arguments, mode_t); \
    va_end(arguments); \
    if (WRITES(flags) && is_at_below(fd, path) && is_due(OPEN)) return fail(); \
    return real(fd, path, flags, mode); \
  }
OPENAT_CALL(openat)
OPENAT_CALL(openat64)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  if (is_fd_below(fd) && is_due(WRITE)) {
    if (size > 1 && real(fd, data, size / 2) < 0) return -1;
    return fail();
  }
  return real(fd, data, size);
}

#define PWRITE_CALL(name, offset_t) \
  ssize_t name(int fd, const void *data, size_t size, offset_t offset) { \
    REAL(name); \
    if (is_fd_below(fd) && is_due(WRITE)) { \
      if (size > 1 && real(fd, data, size / 2, offset) < 0) return -1; \
      return fail(); \
    } \
    return real(fd, data, size, offset); \
  }
PWRITE_CALL(pwrite, off_t)
PWRITE_CALL(pwrite64, off64_t)

#define SYNC_CALL(name) \
  int name(int fd) { \
    REAL(name); \
    return is_fd_below(fd) && is_due(FSYNC) ? fail() : real(fd); \
  }
SYNC_CALL(fsync)
SYNC_CALL(fdatasync)

static int finish_rename(int result, int below) {
  if (!result && below && is_due(AFTER_RENAME)) return fail();
  return result;
}

int rename(const char *from, const char *to) {
  REAL(rename);
  int below = is_at_below(AT_FDCWD, to);
  if (below && is_due(RENAME)) return fail();
  return finish_rename(real(from, to), below);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
  REAL(renameat);
  int below = is_at_below(to_fd, to);
  if (below && is_due(RENAME)) return fail();
  return finish_rename(real(from_fd, from, to_fd, to), below);
}

int unlink(const char *path) {
  REAL(unlink);
  return is_at_below(AT_FDCWD, path) && is_due(UNLINK) ? fail() : real(path);
}

int unlinkat(int fd, const char *path, int flags) {
  REAL(unlinkat);
  return is_at_below(fd, path) && is_due(UNLINK) ? fail() : real(fd, path, flags);
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  return is_at_below(AT_FDCWD, path) && is_due(MKDIR) ? fail() : real(path, mode);
}

int mkdirat(int fd, const char *path, mode_t mode) {
  REAL(mkdirat);
  return is_at_below(fd, path) && is_due(MKDIR) ? fail() : real(fd, path, mode);
}

#define TRUNCATE_CALL(name, offset_t) \
  int name(int fd, offset_t length) { \
    REAL(name); \
    return is_fd_below(fd) && is_due(TRUNCATE) ? fail() : real(fd, length); \
  }
TRUNCATE_CALL(ftruncate, off_t)
TRUNCATE_CALL(ftruncate64, off64_t)

ssize_t read(int fd, void *data, size_t size) {
  REAL(read);
  return is_fd_below(fd) && is_due(READ) ? fail() : real(fd, data, size);
}

DIR *opendir(const char *path) {
  REAL(opendir);
  if (is_at_below(AT_FDCWD, path) && is_due(LIST)) {
    fail();
    return NULL;
  }
  return real(path);
}

#define STAT_CALL(name, buffer_t) \
  int name(const char *path, buffer_t *buffer) { \
    REAL(name); \
    int below = is_at_below(AT_FDCWD, path); \
    return below && is_due(STAT) ? fail() : real(path, buffer); \
  }
STAT_CALL(stat, struct stat)
STAT_CALL(lstat, struct stat)
STAT_CALL(stat64, struct stat64)
STAT_CALL(lstat64, struct stat64)
