-- Puts the headers of a file into what Envoy sends to a collector. The file is read each time, a few times a minute,
-- so a key that is replaced there is in use at once. Without the file, things go without them.

function envoy_on_request(handle)
  local file = io.open(FILE, "r")
  if file == nil then
    return
  end
  for line in file:lines() do
    local name, value = line:match("^%s*([%w_-]+)%s*:%s*(.-)%s*$")
    if name then
      handle:headers():replace(name:lower(), value)
    end
  end
  file:close()
end
