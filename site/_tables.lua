-- On a phone a row of three cells or more stands as a list, each cell behind its head (td[data-head] in styles.css).
-- Printed text wraps, but not a table that is drawn with lines.
function Table(found)
  local head = found.head.rows[1]
  local names = head and head.cells:map(function(cell) return pandoc.utils.stringify(cell.contents) end) or {}
  if #names < 3 then return nil end
  for _, body in ipairs(found.bodies) do
    for _, row in ipairs(body.body) do
      for column, cell in ipairs(row.cells) do
        cell.attributes["data-head"] = names[column] or ""
        if #cell.contents > 0 then cell.contents = { pandoc.Div(cell.contents) } end
      end
    end
  end
  return found
end

function CodeBlock(block)
  if #block.classes == 0 and not block.text:match("[│┃]") then block.classes:insert("wrapped") return block end
end
