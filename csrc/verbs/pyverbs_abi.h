// What of libibverbs's ABI the core uses: the structs that every program compiled against it has in itself, since
// ibv_post_send, ibv_poll_cq and ibv_req_notify_cq are inline functions of its header. They have not changed since
// IBVERBS_1.1, and can't: tests/rdma/verbs/test_native_queues.py compares them with the header, where it is installed.
//
// Nothing is opened or made here: that is pyverbs's or the ibverbs wheel's. So there is neither that header nor the
// library, at build time and at run time.
#pragma once

#include <cstdint>

namespace monarch::verbs {

inline constexpr int reliable = 2;  // IBV_QPT_RC

struct Cq;
struct Qp;
struct SendWr;
struct Wc;

struct Context {
  void* device;
  void* before_poll[11];
  int (*poll_cq)(Cq*, int, Wc*);
  int (*req_notify_cq)(Cq*, int);
  void* between[12];
  int (*post_send)(Qp*, SendWr*, SendWr**);
  void* after_post[6];
  int cmd_fd;
  int async_fd;
};

struct Channel {
  Context* context;
  int fd;
  int refcnt;
};

struct Cq {  // its beginning
  Context* context;
  Channel* channel;
  void* cq_context;
  std::uint32_t handle;
  int cqe;
};

struct Qp {  // its beginning
  Context* context;
  void* qp_context;
  void* pd;
  Cq* send_cq;
  Cq* recv_cq;
  void* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
  int state;
  int qp_type;
};

struct Sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

struct SendWr {
  std::uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  std::uint32_t imm_data;
  union {
    struct {
      std::uint64_t remote_addr;
      std::uint32_t rkey;
    } rdma;
    struct {
      std::uint64_t remote_addr;
      std::uint64_t compare_add;
      std::uint64_t swap;
      std::uint32_t rkey;
    } atomic;
  } wr;
  std::uint64_t for_others[7];  // of other transports and opcodes; not used
};

struct Wc {
  std::uint64_t wr_id;
  int status;
  int opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;
  std::uint32_t qp_num;
  std::uint32_t src_qp;
  unsigned wc_flags;
  std::uint16_t pkey_index;
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t dlid_path_bits;
};

}  // namespace monarch::verbs
