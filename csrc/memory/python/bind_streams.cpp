// Python bindings of registered memory on other hosts, without logic. The GIL is released during waits.
#include "bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "memory/client.h"
#include "memory/same_host.h"
#include "memory/python/shapes.h"
#include "memory/registered_memory.h"
#include "memory/server.h"

namespace py = pybind11;

namespace monarch {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;
TimePoint deadline_in(std::optional<double> seconds) {
  if (!seconds) return TimePoint::max();
  const double longest = 1e8;  // three years: what the clock can surely add
  const std::chrono::duration<double> wait(std::clamp(*seconds, 0.0, longest));
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<TimePoint::duration>(wait);
}

std::string_view bytes_of(const py::bytes& bytes) { return bytes; }

std::shared_ptr<Identity> identity_of(const std::string& token, const py::bytes& secret, const py::bytes& certificate,
                                      const py::bytes& key, const py::bytes& ca) {
  return std::make_shared<Identity>(token, std::string(bytes_of(secret)), std::string(bytes_of(certificate)),
                                    std::string(bytes_of(key)), std::string(bytes_of(ca)));
}

Result read(Client& client, const PyTicket& ticket, const PySegments& places, std::optional<double> seconds, const Cancel* cancel) {
  return client.read(ticket_of(ticket), segments_of(places), deadline_in(seconds), cancel);
}

Result write(Client& client, const PyTicket& ticket, const PySegments& places, std::optional<double> seconds, const Cancel* cancel) {
  return client.write(ticket_of(ticket), segments_of(places), deadline_in(seconds), cancel);
}

Result fetch_add(Client& client, const PyTicket& ticket, std::uint64_t offset, std::uint64_t operand,
                 std::optional<double> seconds, const Cancel* cancel) {
  return client.atomic(ticket_of(ticket), offset, Access::fetch_add, operand, 0, deadline_in(seconds), cancel);
}

Result compare_and_swap(Client& client, const PyTicket& ticket, std::uint64_t offset, std::uint64_t expected,
                        std::uint64_t wanted, std::optional<double> seconds, const Cancel* cancel) {
  return client.atomic(ticket_of(ticket), offset, Access::compare_and_swap, wanted, expected, deadline_in(seconds), cancel);
}

PyResult move(Client& client, const PyTicket& ticket, bool write, const PySegments& places, const CancelScope& scope) {
  const auto act = write ? &Client::write : &Client::read;
  return result_of((client.*act)(ticket_of(ticket), segments_of(places), scope.deadline, scope.event()));
}

PyResult change(Client& client, const PyTicket& ticket, std::uint32_t access, std::uint64_t offset, std::uint64_t operand,
             std::uint64_t expected, const CancelScope& scope) {
  return result_of(client.atomic(ticket_of(ticket), offset, static_cast<Access>(access), operand, expected, scope.deadline, scope.event()));
}

std::unique_ptr<SmallRequest> begin(Client& client, const PyTicket& ticket, std::uint32_t access, const PySegments& places, std::uint64_t operand,
                              std::uint64_t expected, const CancelScope& scope) {
  return client.begin(static_cast<Access>(access), ticket_of(ticket), segments_of(places), operand, expected, scope.deadline, scope.event());
}

std::optional<PyResult> fetch(SmallRequest& small_request, std::optional<double> seconds) {
  const std::optional<Result> result = small_request.fetch(deadline_in(seconds), !seconds);
  if (!result) return {};
  return result_of(*result);
}

PyResult send_request(StagingConnection& connection, bool write, const PyTicket& ticket, const PySegments& ranges, std::uint64_t buffer, std::uint32_t slot,
             std::uint64_t sequence) {
  return result_of(connection.send_request({write, ticket_of(ticket), buffer, slot, sequence}, segments_of(ranges)));
}

std::pair<std::unique_ptr<StagingConnection>, PyResult> open_staging_connection(Client& client, const CancelScope& scope) {
  Result result;
  std::unique_ptr<StagingConnection> made = client.open_staging_connection(scope.deadline, scope.event(), result);
  return {std::move(made), result_of(result)};
}

// What the system has refused is an OSError, with its number.
std::uint16_t listen(Server& server, const std::string& address, std::uint16_t port) {
  try {
    const py::gil_scoped_release release;
    return server.listen(address, port);
  } catch (const std::system_error& error) {
    const py::object text = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, text.ptr());
    throw py::error_already_set();
  }
}

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::done:
      return "done";
    case Outcome::refused:
      return "refused";
    case Outcome::unreachable:
      return "unreachable";
    case Outcome::lost:
      return "lost";
    case Outcome::late:
      return "timed_out";
    case Outcome::failed:
      return "failed";
    case Outcome::cancelled:
      return "cancelled";
  }
  return "";
}

const char* name_of(Refusal refusal) {
  switch (refusal) {
    case Refusal::none:
      return "";
    case Refusal::dropped:
      return "dropped";
    case Refusal::wrong_key:
      return "wrong_key";
    case Refusal::out_of_range:
      return "out_of_range";
    case Refusal::read_only:
      return "read_only";
    case Refusal::misaligned:
      return "misaligned";
    case Refusal::device:
      return "device";
    case Refusal::no_atomics:
      return "no_atomics";
    case Refusal::no_staging:
      return "no_staging";
  }
  return "unknown";
}

}  // namespace

void bind_memory_streams(py::module_& m) {
  const auto seconds = py::arg("seconds") = py::none();
  const auto cancel = py::arg("cancel") = py::none();

  py::class_<Identity, std::shared_ptr<Identity>>(m, "MemoryIdentity", "Identity of this process towards others that access its memory.")
      .def(py::init(&identity_of), py::arg("token"), py::arg("secret"), py::arg("certificate") = py::bytes(),
           py::arg("key") = py::bytes(), py::arg("ca") = py::bytes())
      .def_property_readonly("encrypted", [](const Identity& identity) { return identity.tls() != nullptr; });

  py::class_<Cancel, std::shared_ptr<Cancel>>(m, "Cancel", "Ends transfers that wait, once and for all.")
      .def(py::init<>())
      .def("set", &Cancel::set)
      .def("is_set", &Cancel::is_set);

  py::class_<Result>(m, "TransferResult", "How a transfer has ended.")
      .def_property_readonly("outcome", [](const Result& result) { return name_of(result.outcome); })
      .def_property_readonly("refusal", [](const Result& result) { return name_of(result.refusal); })
      .def_readonly("text", &Result::text)
      .def_readonly("value", &Result::found);

  py::class_<Server, std::shared_ptr<Server>>(m, "MemoryServer", "Serves the memory of this process to other hosts.")
      .def(py::init([](std::shared_ptr<Registered> registered, std::shared_ptr<Identity> identity, std::size_t most) {
             return std::make_shared<Server>(std::make_shared<MemoryAdapter<Table>>(registered->shared_table()), std::move(identity), most);
           }),
           py::arg("memory"), py::arg("identity"), py::arg("most") = 1024)
      .def("listen", &listen, py::arg("address"), py::arg("port") = 0)
      .def("connections", &Server::connections)
      .def("add_staging", [](Server& server, std::uint64_t key, std::shared_ptr<gpu::Pinned> memory, std::uint64_t slot_bytes) {
        char* const base = memory->data();
        const auto slots = static_cast<std::uint32_t>(memory->bytes() / slot_bytes);
        server.staging().add(key, std::make_shared<StagingBuffer>(std::move(memory), base, slot_bytes, slots));
      })
      .def("remove_staging", [](Server& server, std::uint64_t key) { server.staging().remove(key); }, Release())
      .def("close", &Server::close, Release())
      .def("abandon", &Server::abandon);

  py::class_<SmallRequest>(m, "SmallRequest", "A small transfer in flight, whose result one caller fetches.")
      .def("fetch", &fetch, Release(), py::arg("seconds"))
      .def_property_readonly("is_over", &SmallRequest::is_over);

  py::class_<StagingConnection>(m, "StagingConnection", "A connection for one thread's requests to copy to and from a peer's staging memory.")
      .def("send_request", &send_request, Release(), py::arg("write"), py::arg("ticket"), py::arg("ranges"), py::arg("buffer"), py::arg("slot"), py::arg("sequence"))
      .def("receive_reply", [](StagingConnection& connection) { return result_of(connection.receive_reply()); }, Release())
      .def("close", &StagingConnection::release, Release());

  py::class_<Client, std::shared_ptr<Client>>(m, "MemoryClient", "Reads and writes the memory of one process elsewhere.")
      .def(py::init([](std::string address, std::uint16_t port, std::shared_ptr<Identity> identity, const std::string& owner_token,
                       std::size_t streams) {
             return std::make_shared<Client>(std::move(address), port, std::move(identity), owner_token, streams);
           }),
           py::arg("address"), py::arg("port"), py::arg("identity"), py::arg("owner_token"), py::arg("streams") = 4)
      .def("read", &read, Release(), py::arg("ticket"), py::arg("segments"), seconds, cancel)
      .def("write", &write, Release(), py::arg("ticket"), py::arg("segments"), seconds, cancel)
      .def("fetch_add", &fetch_add, Release(), py::arg("ticket"), py::arg("offset"), py::arg("operand"), seconds, cancel)
      .def("compare_and_swap", &compare_and_swap, Release(), py::arg("ticket"), py::arg("offset"), py::arg("expected"),
           py::arg("wanted"), seconds, cancel)
      .def("move", &move, Release())
      .def("change", &change, Release())
      .def("begin", &begin, Release(), py::keep_alive<0, 1>(), py::keep_alive<0, 7>())
      .def("open_staging_connection", &open_staging_connection, Release())
      .def("close", &Client::close, Release())
      .def("abandon", &Client::abandon);
}

}  // namespace monarch
