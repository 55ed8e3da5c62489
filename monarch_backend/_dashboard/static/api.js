// Requests to the HTTP API. The token is in the address's fragment, which browsers do not send, then in the storage of
// this tab: other ports of this machine cannot read it, as they could a cookie.

const KEY = "monarch-token";

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given !== null) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname + "#/ranks");
  }
  return sessionStorage.getItem(KEY) ?? "";
}

const token = takeToken();

export class ApiError extends Error {}

// Return the answer of a route. Throws ApiError with a text for people.
export async function request(path, parameters = {}, { post = false, signal } = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== "" && value !== undefined);
  const options = { headers: { Authorization: `Bearer ${token}` }, signal };
  let url = `api/v1/${path}`;
  if (post) {
    Object.assign(options, { method: "POST", body: JSON.stringify(Object.fromEntries(given)) });
    options.headers["Content-Type"] = "application/json";
  } else if (given.length) {
    url += `?${new URLSearchParams(given)}`;
  }
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The dashboard does not answer: it has ended, or the connection is lost.");
  }
  const answer = await response.json();
  if (!response.ok) throw new ApiError(`${answer.error} (${answer.hint})`);
  return answer;
}
