-- What an answer says of itself, in the OpenAI, Responses and Anthropic shapes, noted in the namespace `llm.tail`:
--
--   in, out, cached, cache_write, reasoning   the provider's numbers; Anthropic's `in` leaves cached tokens out
--   finish   why the model stopped, in the provider's word; an unfinished Responses answer gives its reason
--   done     "1" once the answer is complete: JSON whole, [DONE], message_stop, response.completed
--   error    "type/code" of an error inside an answer
--   state    id by which a later request may build on this answer
--   cut      "1" where a stream ended early without a word, and an error event was appended to it
--   events   how many events of a stream went by; written in steps of an eighth, and at the end
--   bad      a failure that looks like success: "json" (an event or an answer that is none), "empty" (complete, and
--            nothing in it), "short" (ended by a cap that it is far from), "broken" (it says so, as its finish)

local NUMBERS = {
  { "in", "prompt_tokens" },
  { "in", "input_tokens" },
  { "out", "completion_tokens" },
  { "out", "output_tokens" },
  { "cached", "cache_read_input_tokens" },
  { "cached", "prompt_cache_hit_tokens" },
  { "cache_write", "cache_creation_input_tokens" },
}
local DETAILS = {
  { "cached", "prompt_tokens_details", "cached_tokens" },
  { "cached", "input_tokens_details", "cached_tokens" },
  { "reasoning", "completion_tokens_details", "reasoning_tokens" },
  { "reasoning", "output_tokens_details", "reasoning_tokens" },
}

-- Usage is cumulative wherever it is sent more than once, so the largest counts; adding it up would count twice.
local function most(notes, key, value)
  if value and value > (notes[key] or -1) then notes[key] = value end
end

local function note_usage(s, i, notes)
  if not object(s, i) then return end
  local at = members(s, i)
  for _, n in ipairs(NUMBERS) do most(notes, n[1], number(s, at[n[2]])) end
  -- Gemini leaves its thinking out of `completion_tokens`, and bills it.
  local sent, total = number(s, at.prompt_tokens), number(s, at.total_tokens)
  if sent and total and at.completion_tokens then most(notes, "out", total - sent) end
  for _, d in ipairs(DETAILS) do
    if object(s, at[d[2]]) then most(notes, d[1], number(s, members(s, at[d[2]])[d[3]])) end
  end
end

-- "type/code" of the error with members `at`; a dash stands for what it does not name.
local function words_of(s, at)
  local message = string_at(s, at.message)
  if message == "" then message = string_at(s, at.detail) end
  local code = code_of(message) or word(s, at.code) or word(s, at.statusCode) or word(s, at.status_code)
  local kind = word(s, at.type) or word(s, at.__type) or word(s, at.error_type) or word(s, at.status)
  return (kind or "-") .. "/" .. (code or "-")
end

-- The same of the error object or bare error word at `i`.
local function error_word(s, i)
  if object(s, i) then return words_of(s, (members(s, i))) end
  return (word(s, i) or "-") .. "/" .. (code_of(string_at(s, i)) or "-")
end

-- Members of an answer, and of an event that carries a part of one.
local PARTS = { "choices", "content", "content_block", "delta", "item", "output", "part", "response" }

-- Whether `code` is no status of success.
local function is_wrong(code)
  local status = tonumber(code)
  return code ~= nil and not (status and status >= 0 and status < 400)
end

-- Whether the object with members `at` is an error that has no member `error`: vLLM's `object`, a type, FastAPI's
-- `detail`, or a message with a code or a status of failure, or all alone. Progress is told in messages, too.
local function flat_error(s, at)
  for _, name in ipairs(PARTS) do
    if at[name] then return false end
  end
  local kind = word(s, at.type) or word(s, at.object) or ""
  if kind == "error" or word(s, at.object) == "error" then return true end
  if find(kind, "^response%.") then return false end
  if at.detail and find(s, '^["{%[]', at.detail) then return true end
  if string_at(s, at.message) == "" then return false end
  local status = number(s, at.status) or number(s, at.statusCode) or number(s, at.status_code)
  if find(kind, "[Ee]rror") or find(kind, "Exception$") or at.__type or at.error_type then return true end
  return is_wrong(word(s, at.code)) or is_wrong(status) or next(at, (next(at))) == nil
end

local function note_choices(s, i, notes)
  local j = match(s, "^%[%s*()", i)
  while object(s, j) do
    local at, stop = members(s, j)
    local finish = at.finish_reason and byte(s, at.finish_reason) == QUOTE and word(s, at.finish_reason)
    if finish then notes.finish = finish end
    j = stop and match(s, "^%s*,%s*()", stop)
  end
end

local ENDS = { completed = true, incomplete = true, failed = true, cancelled = true }

-- A Responses API object, alone or inside an event.
local function note_response(s, at, notes)
  local status = word(s, at.status)
  if not ENDS[status] then return end
  local reason = object(s, at.incomplete_details) and word(s, members(s, at.incomplete_details).reason)
  notes.finish = reason or status
  notes.done = "1"
  notes.state = word(s, at.id)
end

-- Notes what the answer or event with members `at` says.
local function note_members(s, at, notes)
  note_usage(s, at.usage, notes)
  if at.choices then note_choices(s, at.choices, notes) end
  if object(s, at.error) or word(s, at.error) then notes.error = error_word(s, at.error) end
  if at.stop_reason and byte(s, at.stop_reason) == QUOTE then notes.finish = word(s, at.stop_reason) end
  if at.output and at.status then note_response(s, at, notes) end
end

-- Writes what changed in `notes` since `told` to the request's metadata. The object is fetched anew each time: it does
-- not outlive the call that it was fetched in.
local function tell(handle, notes, told)
  local metadata
  for key, value in pairs(notes) do
    if told[key] ~= value then
      metadata = metadata or handle:streamInfo():dynamicMetadata()
      metadata:set("llm.tail", key, value)
      told[key] = value
    end
  end
end
